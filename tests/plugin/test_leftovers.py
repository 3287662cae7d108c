"""What a run leaves on disk: what was asked for, and nothing else."""

from __future__ import annotations

import tempfile


def test_compiled_packages_without_a_cache_end_with_their_test(project, tmp_path, monkeypatch, packaged_as_exported):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    project.pytester.makepyfile(
        """
        import torch
        from models import *

        def test_stages(compile_model, capture_graphs, assert_replay_close):
            compiled = compile_model(Mlp().eval(), torch.randn(1, 16), mode="aot", batch_sizes=[1])
            assert_replay_close(capture_graphs(compiled))
        """
    )
    project.measure("-p", "no:cacheprovider").assert_outcomes(passed=1)
    (folder,) = packaged_as_exported
    assert folder.is_relative_to(temporary)
    assert not list(temporary.glob("pytest-cudagraph-*"))


def test_a_cache_that_cannot_be_written_is_one_clear_error(project):
    (project.path / "file").write_text("", encoding="utf-8")
    project.write(plain="cudagraph(Mlp().eval(), torch.randn(1, 16), compile='aot')")
    result = project.measure("-o", "cache_dir=file/cache")
    result.assert_outcomes(failed=1)
    words = "keeps packages in pytest's cache, which cannot be written: *: *file"
    result.stdout.fnmatch_lines([f"E*CompileFailed: compile='aot' {words}"])
    assert "pytest_cudagraph/" not in result.stdout.str()
