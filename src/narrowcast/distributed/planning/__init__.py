"""Which codec pays on which link: codec="auto" and `narrowcast plan`.

link          what lies between ranks, measured or on paper
codec_speed   how fast each codec is here; devices: on GPUs by name
advice        larger buckets, fewer meetings
prediction    how long a step's reductions take
planner       the choice
pairs         every pair of ranks, measured, for `narrowcast doctor --group`
"""
