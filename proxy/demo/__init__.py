"""What `prefix-proxy demo` and the end-to-end tests are made of.

`recipe` makes the environment in a cache folder (`needs` says first what this machine lacks, `pip` runs the installer,
`smollm2` turns the packaged weights into a model folder), `server` runs a real vLLM, `chat` plays a conversation with
it and `table` prints what came back.  Nothing here is imported by the proxy itself.
"""
