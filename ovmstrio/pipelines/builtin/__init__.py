"""OVMS's example custom nodes, built in: EAST OCR, face blur, object detection and others."""
