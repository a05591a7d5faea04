"""Finished networks as files: ONNX, torch.export, safetensors, and the bundle."""
