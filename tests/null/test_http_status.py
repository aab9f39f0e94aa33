"""What the service says about itself over HTTP."""

from __future__ import annotations

from penstock import __version__
from penstock.api.auth import Tenant
from penstock.config.limits import RequestLimits

from .http_stage import MODEL, stage
from .streams import NullStreams
from .test_http_classes import key, ring


async def test_models_tell_the_context():
    async with stage() as on:
        (model,) = (await on.client.get("/v1/models")).json()["data"]
        assert model == {
            "id": MODEL,
            "object": "model",
            "created": 1,
            "owned_by": "penstock",
            "max_model_len": 2048,
            "context_length": 2048,
            "max_context_length": 2048,
            "context_window": 2048,
            "max_input_tokens": 2048,
            "meta": {"n_ctx_train": 2048, "n_ctx": 2048},
            "type": "model",
            "display_name": MODEL,
            "created_at": "1970-01-01T00:00:01Z",
            "default_sampling_params": {"temperature": 0.7, "top_p": 0.9},
        }
        assert (await on.client.get(f"/v1/models/{MODEL}")).json() == model


async def test_health_is_progress():
    async with stage() as on:
        assert (await on.client.get("/health")).status_code == 200
        on.streams.stuck = "3 requests are open and no worker has made a step for 7.0 s"
        stuck = await on.client.get("/health")
        assert stuck.status_code == 503
        assert stuck.json() == {"status": "stuck", "reason": on.streams.stuck}


async def test_ready_is_apart_from_health():
    async with stage(NullStreams(is_ready=False)) as on:
        assert (await on.client.get("/health")).status_code == 200
        answer = await on.client.get("/ready")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        on.streams.is_ready = True
        assert (await on.client.get("/ready")).status_code == 200


async def test_metrics_version_and_workers():
    row = {"id": "prefill-0", "role": "prefill", "pid": 7, "state": "ready", "kv_pages_leaked": 0}
    async with stage(NullStreams(rows=[row])) as on:
        metrics = await on.client.get("/metrics")
        assert metrics.text == "# no metrics\n"
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (await on.client.get("/version")).json() == {"version": __version__}
        found = (await on.client.get("/admin/workers")).json()
        assert found["workers"] == [row]
        assert found["service"].pop("uptime_s") >= 0
        assert found["service"] == {"model": MODEL, "max_model_len": 2048, "version": __version__}


async def test_tokenize_and_detokenize_as_vllm_has_them():
    async with stage() as on:
        told = (await on.post("/tokenize", {"model": MODEL, "prompt": "Once upon", "return_token_strs": True})).json()
        assert told == {
            "count": 2,
            "max_model_len": 2048,
            "tokens": told["tokens"],
            "token_strs": ["Once", "Ġupon"],
        }
        back = await on.post("/detokenize", {"model": MODEL, "tokens": told["tokens"]})
        assert back.json() == {"prompt": "Once upon"}


async def test_why_this_worker_is_told_of_remembered_requests():
    async with stage() as on:
        unknown = await on.client.get("/debug/requests/nobody")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "request_not_found"
        name = (await on.chat(n=2, temperature=1)).json()["id"]
        on.streams.explained = [f"{name}/0", f"{name}/1"]
        told = (await on.client.get(f"/debug/requests/{name}")).json()
        assert [choice["id"] for choice in told["choices"]] == on.streams.explained
        assert told["choices"][0]["decisions"] == [{"because": "there is nobody else"}]
        assert len((await on.client.get(f"/debug/requests/{name}/1")).json()["choices"]) == 1
    async with stage(None, None, "a-key") as on:
        assert (await on.client.get("/debug/requests/x")).status_code == 401


async def test_a_header_tells_the_route_when_asked_and_nothing_that_would_break_it():
    async with stage() as on:
        for stream in (False, True):
            assert "x-penstock-route" not in (await on.chat(stream=stream)).headers
            on.client.headers["x-penstock-explain"] = "1"
            assert (await on.chat(stream=stream)).headers["x-penstock-route"] == "whole=???"
            del on.client.headers["x-penstock-explain"]
        on.streams.explains = False
        on.client.headers["x-penstock-explain"] = "1"
        assert "x-penstock-route" not in (await on.chat()).headers


async def test_the_route_is_for_operators():
    """It says how much others have running."""
    tenants = ring(ann=Tenant(id="a1"), root=Tenant(id="r0", operator=True))
    async with stage(ring=tenants) as on:
        for name, told in (("ann", False), ("root", True)):
            on.client.headers.update(key(name, **{"x-penstock-explain": "1"})["headers"])
            answer = await on.chat()
            assert answer.status_code == 200
            assert ("x-penstock-route" in answer.headers) is told


async def test_a_session_comes_from_a_header_or_the_body():
    async with stage(None, RequestLimits(max_session_chars=8)) as on:
        await on.chat(prompt_cache_key="body")
        on.client.headers["x-session-affinity"] = " header "
        await on.chat(prompt_cache_key="body")
        assert [request.session for request in on.streams.opened] == ["body", "header"]
        on.client.headers["x-session-affinity"] = "123456789"
        refused = await on.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "session_too_long")
        assert "x-session-affinity has 9 characters; at most 8" in refused.json()["error"]["message"]
        del on.client.headers["x-session-affinity"]
        assert (await on.chat(prompt_cache_key="123456789")).status_code == 400
