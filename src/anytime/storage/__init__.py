"""Distributed checkpoints without pickle: tensors in safetensors files, everything else in one JSON file.

A folder holds index.json, which says which part of which tensor is in which file and has all other values, and one
part-….safetensors for each process that had something to write. Whatever way tensors were sharded when they were
saved, they can be read in any other way.
"""

from __future__ import annotations

from .dcp import JsonLoadPlanner, JsonSavePlanner, SafetensorsReader, SafetensorsWriter, async_save, load, save

__all__ = [
    "JsonLoadPlanner",
    "JsonSavePlanner",
    "SafetensorsReader",
    "SafetensorsWriter",
    "async_save",
    "load",
    "save",
]
