"""The cache over HTTP: calls that find the cached part of a prompt, compute a prompt ahead, or forget its blocks.

1. bodies      the bodies of requests (`bodies`)
2. pools       questions to the allocators of the workers' pools (`pools`)
3. endpoints   match, warm, drop (`endpoints`)
"""
