"""Hardware: what there is, how much memory it has. The only room that names torch.cuda and torch.mps."""
