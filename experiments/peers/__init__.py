"""What does a step cost in torch.distributed.pipelining?"""
