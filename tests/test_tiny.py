"""The product on one page: run, compare, ask why, draw, go back, branch.

No torch, no browser, under a second.
"""

import cbviz as cb

QUESTIONS = [
    cb.RequestSpec(f"r{i}", tuple(range(100, 120 + 7 * i)), 5 + 9 * (i % 4), arrival_step=1 + 2 * i)
    for i in range(12)
]


def test_tiny() -> None:
    runs = {
        d: cb.Session(QUESTIONS, runner="sim", discipline=d, max_num_seqs=4, num_blocks=33, max_model_len=160)
        for d in ("static", "chunked")
    }
    for s in runs.values():
        s.run()
    static, chunked = runs["static"], runs["chunked"]

    # the same tokens, whatever the schedule
    assert cb.compare(static.trace, chunked.trace).tokens_equal
    assert all(
        static.request(r).output_token_ids == chunked.request(r).output_token_ids for r in static.request_ids
    )

    # and sooner: seats do not stand idle until a batch ends
    before, after = cb.metrics(static.trace), cb.metrics(chunked.trace)
    assert before["output_tokens"] == after["output_tokens"] == sum(q.max_tokens for q in QUESTIONS)
    for figure in ("makespan_s", "mean_ttft_s", "mean_e2e_s"):
        assert after[figure] < before[figure]
    assert after["batch_utilisation"] > before["batch_utilisation"]

    # why does somebody wait?
    step = next(r.step for r in static.trace if any(type(e).__name__ == "NotAdmitted" for e in r.events))
    assert any("wait" in sentence for sentence in cb.explain(static.trace, step))

    # a picture is a plain Plotly figure of any moment
    figure = cb.views.timeline(chunked.trace, cb.Cursor(12))
    assert figure["data"] and figure["layout"]

    # back to step 12, and another way from there
    chunked.seek(12)
    branch = chunked.fork(policy="sjf")
    branch.run()
    difference = cb.compare(chunked.trace, branch.trace)
    assert difference.tokens_equal and branch.trace.records[:12] == chunked.trace.records[:12]

    # type a request while it runs; take one out
    chunked.rewind(12)
    rid = chunked.add("Write a haiku about the sea.", max_tokens=5)
    chunked.abort("r11")
    chunked.run()
    assert chunked.request(rid).finish_reason == "length" and chunked.request("r11").finish_reason != "length"
    assert chunked.state().num_free_blocks == 32


def test_a_file_holds_everything(tmp_path) -> None:
    s = cb.Session(QUESTIONS, runner="sim", num_blocks=33, max_model_len=160)
    s.run(max_steps=20)
    again = cb.Session.from_trace(cb.load(s.save(tmp_path / "run.jsonl.gz")))
    s.run()
    again.run()
    assert cb.compare(s.trace, again.trace).equal and again.digest() == s.digest()
