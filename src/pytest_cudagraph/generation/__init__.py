"""Decoding with captured steps: the interface of a decoder, the engine, and the adapter for transformers."""

from pytest_cudagraph.generation.decoder import Decoder, DecoderFacts, check_decoder
from pytest_cudagraph.generation.engine import DecodeEngine, Generated, Step
from pytest_cudagraph.generation.greedy import GreedyRun, report_of, run_once
from pytest_cudagraph.generation.transformers_decoder import StaticDecoder, static_decoder

__all__ = [
    "DecodeEngine",
    "Decoder",
    "DecoderFacts",
    "Generated",
    "GreedyRun",
    "StaticDecoder",
    "Step",
    "check_decoder",
    "report_of",
    "run_once",
    "static_decoder",
]
