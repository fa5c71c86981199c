"""Pipelines: a model cut into stages, with several microbatches on the way at the same time.

All of this needs no MPI. `read_profile` reads the times and sizes of a model's layers, `cut`
chooses the stages, `action_lists` returns what each rank does in a schedule, `check_actions` proves
such lists, `simulate_actions` estimates their time, and `draw_actions` shows it. `why_no_stages`
says whether a model can be cut.
"""

from __future__ import annotations

from .check_actions import ActionFacts, check_actions
from .draw_actions import draw_actions, save_drawing
from .layer_profile import Layer, LayerProfile, chain, read_profile, write_profile
from .pipeline_schedules import SCHEDULES, StageAction, action_lists
from .simulate_actions import ChunkCost, SimulatedRun, simulate_actions
from .stage_contract import why_no_stages
from .stage_partition import COSTS, NoPartition, PipelinePlan, StagePlan, cut

__all__ = [
    "COSTS",
    "SCHEDULES",
    "ActionFacts",
    "ChunkCost",
    "Layer",
    "LayerProfile",
    "NoPartition",
    "PipelinePlan",
    "SimulatedRun",
    "StageAction",
    "StagePlan",
    "action_lists",
    "chain",
    "check_actions",
    "cut",
    "draw_actions",
    "read_profile",
    "save_drawing",
    "simulate_actions",
    "why_no_stages",
    "write_profile",
]


def __dir__():
    return sorted(__all__)
