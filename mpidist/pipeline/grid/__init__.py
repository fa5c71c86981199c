"""Code that makes choices for a pipeline.

It chooses on which host each stage is, in which order a rank computes with the schedule
"pipedream", and where a resumed run cuts its model into stages.
"""
