"""Tasks, graders, PPO, the methods compared, training and its checkpoints."""
