"""The bundled engine on a GPU: Triton kernels, KV on the device, CUDA graphs for decoding."""
