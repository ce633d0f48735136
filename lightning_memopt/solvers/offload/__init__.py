"""What to park and when it comes back. `trips` plans the copies of chosen tensors. `dymem` chooses tensors by the dependencies
between layers (Yang, Cheng, HPDC 2020). `policies` has those that Dymem and FreeLunch compare with: vDNN, SuperNeurons,
compression. A new policy is a `policy.Policy` with an entry in `policies.POLICIES`; `joint` then starts from it, too.
"""
