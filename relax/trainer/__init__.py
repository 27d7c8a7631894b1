"""The trainer: FSDP2 actor and critic, blind to algorithms; stages pass the loss."""
