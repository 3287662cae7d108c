"""Decoding with captured steps: the interface of a decoder, the engine, and the adapter for transformers."""

from pytest_cudagraph.generation.decoder import Decoder, DecoderFacts, check_decoder
from pytest_cudagraph.generation.engine import DecodeEngine, Generated, Step
from pytest_cudagraph.generation.greedy import GreedyRun, report_of, run_once
from pytest_cudagraph.generation.lookup import LookupRequest, run_lookup
from pytest_cudagraph.generation.prefill import PrefillRequest, compare_prefill, judge_prefill
from pytest_cudagraph.generation.transformers_decoder import StaticDecoder, static_decoder

__all__ = [
    "DecodeEngine",
    "Decoder",
    "DecoderFacts",
    "Generated",
    "GreedyRun",
    "LookupRequest",
    "PrefillRequest",
    "StaticDecoder",
    "Step",
    "check_decoder",
    "compare_prefill",
    "judge_prefill",
    "report_of",
    "run_lookup",
    "run_once",
    "static_decoder",
]
