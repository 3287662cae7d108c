"""Decoding with captured steps: the interface of a decoder, the engine, and the adapter for transformers."""

from pytest_cudagraph.generation.compare_modes import ModesRequest, ModesRun, fallback_notes, token_ids
from pytest_cudagraph.generation.decoder import Decoder, DecoderFacts, check_decoder
from pytest_cudagraph.generation.engine import DecodeEngine, Generated, Step
from pytest_cudagraph.generation.grammars import Grammar, choice, ebnf, json_schema, python_source, regex
from pytest_cudagraph.generation.greedy import GreedyRun, check_lengths, random_prompts, report_of, run_once
from pytest_cudagraph.generation.guided import GuidedEngine
from pytest_cudagraph.generation.guided_run import GuidedRequest, GuidedRun
from pytest_cudagraph.generation.lookup import LookupRequest, run_lookup
from pytest_cudagraph.generation.prefill import PrefillRequest, compare_prefill, judge_prefill
from pytest_cudagraph.generation.token_masks import GrammarCache
from pytest_cudagraph.generation.transformers_decoder import StaticDecoder, static_decoder
from pytest_cudagraph.generation.transformers_modes import TransformersEngine, transformers_engine
