"""Pipelines: the stages of a model compute at the same time, each for another microbatch.

`md.Stage` runs a pipeline on the ranks of a communicator. `read_profile` reads the times and sizes
of a model's layers, and `cut` chooses the stages from them. `plan_stages` decides which rank has
which layers, and in which order the rank computes its microbatches.
"""

from __future__ import annotations

from .check_actions import ActionFacts, check_actions
from .draw_actions import draw_actions, save_drawing
from .layer_profile import Layer, LayerProfile, chain, read_profile, write_profile
from .measure_layers import measure
from .pipeline_schedules import SCHEDULES, StageAction, action_lists
from .simulate_actions import ChunkCost, SimulatedRun, simulate_actions
from .stage_contract import why_no_stages
from .stage_partition import COSTS, NoPartition, PipelinePlan, StagePlan, cut
from .stage_plan import PipelineGrid, plan_stages

__all__ = [
    "COSTS",
    "SCHEDULES",
    "ActionFacts",
    "ChunkCost",
    "Layer",
    "LayerProfile",
    "NoPartition",
    "PipelineGrid",
    "PipelinePlan",
    "SimulatedRun",
    "StageAction",
    "StagePlan",
    "action_lists",
    "chain",
    "check_actions",
    "cut",
    "draw_actions",
    "measure",
    "plan_stages",
    "read_profile",
    "save_drawing",
    "simulate_actions",
    "why_no_stages",
    "write_profile",
]


def __dir__():
    return sorted(__all__)
