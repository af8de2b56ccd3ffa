"""How FSDP2 hands over its gradients and fetches its parameters.

shards.py     its collectives, in the place of torch's own: where a model is attached
groups.py     the one file that looks into torch's parameter groups; steps.py: where a backward begins and ends
gather.py     the all-gather of parameters, encoded
replicas.py   HSDP: the all-reduce between replicas
hosted.py     shards where ranks share hosts
"""
