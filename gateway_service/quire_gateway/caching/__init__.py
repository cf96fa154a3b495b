"""The cache over HTTP: what of a prompt is cached, computing it ahead, and forgetting it.

1. bodies      the bodies of requests (`bodies`)
2. pools       questions to the allocators of the workers' pools (`pools`)
3. endpoints   match, warm, drop (`endpoints`)
"""
