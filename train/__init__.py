"""Training of DFlash drafters: data, anchors, loss, optimizer, step, checkpoints and the loop."""
