"""Commands around a server: chat, eval, watch, and the HTTP client that they share.

Imports models, ops, tasks and settings.
"""
