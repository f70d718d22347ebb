"""The control process. It shows and steers a running server, and updates the server's models when their bundles change.

Each server has one control process, an asyncio program. See docs/operating.md.
"""
