"""How makers store quantised weights in a folder of safetensors: one file a format, which reads its settings in
``config.json`` and says how a module's tensors become codes and scales (``kernels.quantised``).

``quantization.py`` knows all formats; no format knows another, a model or a kernel.
"""
