"""What `prefix-proxy bench` is made of: Open WebUI's ways of telling a chat, played straight and through the proxy.

`texts` makes documents and questions, `scenarios` tells chats with them, `client` asks and measures, `play` lets users
chat at once on both ways in turn, `report` sums up.  Nothing here is imported by the proxy itself.
"""
