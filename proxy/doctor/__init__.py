"""What `prefix-proxy doctor` looks at, and what it makes of it.

`looking` asks vLLM and `webui` Open WebUI: they gather values and judge nothing.  `vllm_checks`, `webui_checks` and
`flags` are pure: values in, findings out.
"""
