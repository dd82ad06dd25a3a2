"""Where numbers go: JSON lines, TensorBoard, a picture of the learning curve."""
