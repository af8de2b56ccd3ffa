"""Error feedback: what a quantization loses is kept, and added to what is sent next.

segment.py          one run of elements: what is meant, what is sent, the residual
held.py             the residuals of one chunk, in fp32 or in rows
residuals.py        the residuals of all parameters, from step to step
outcome.py          whether a step is applied, and its residuals count
redistribution.py   residuals on another number of ranks
"""
