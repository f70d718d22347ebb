"""The control process: it shows and steers a running server, and keeps its models as their bundles are.

One asyncio program for each runtime directory; see docs/operating.md.
"""
