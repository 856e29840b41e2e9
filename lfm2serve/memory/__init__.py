"""Who owns which bytes: the memory plan, the page pool and the streams' states. No HTTP, no kernels."""
