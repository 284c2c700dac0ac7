"""Held-out evaluation with mlx_vlm / mlx_lm on CPU (greedy generation, exact match).
usage: python eval.py ../final eval.json [--n 40] [--torch torch.json]"""
import argparse, collections, json, os, random, re, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import data
import mlx.core as mx
from mlx_vlm import load, generate, stream_generate
ap = argparse.ArgumentParser(); ap.add_argument("root"); ap.add_argument("out"); ap.add_argument("--n", type=int, default=40); ap.add_argument("--torch", default=""); ap.add_argument("--needle", default="512:30,1024:24,2048:20,4096:14,8192:10,15000:4"); ap.add_argument("--mtpscale", type=float, default=1.0); ap.add_argument("--bs", default="2,3"); ap.add_argument("--parts", default="load,tasks,image,needle,mtp,speed,draft,torch")
a = ap.parse_args(); parts = a.parts.split(",")
t = time.time(); model, proc = load(a.root + "/main"); R = {"load_s": round(time.time() - t, 2)}; tok = proc.tokenizer
SEED = 424242
def prompt(s): return tok.apply_chat_template(s["messages"][:-1], tools=s["tools"], tokenize=False, add_generation_prompt=True, enable_thinking=s["think"])
def target(s): return data.prompt_text(s)[1].split("<|im_end|>")[0]
def kw(s): return dict(image=s["images"]) if s["images"] else {}
def gen(s, n=None):
    r = generate(model, proc, prompt(s), max_tokens=n or len(tok.encode(target(s))) + 8, temperature=0.0, verbose=False, **kw(s)); return r
def clean(x): return x.split("<|im_end|>")[0]
def run(name, f, n, show=2):
    ok = tot = con = bad = 0; rng = random.Random(f"{SEED}{name}"); t0 = time.time()
    while tot < n:
        s = f(rng)
        if s is None: continue
        try: o = clean(gen(s).text)
        except Exception as e: o = "EXC " + repr(e)
        tot += 1; ok += o.strip() == target(s).strip()
        e = s["expect"]; con += (all(x.lower() in o.lower() for x in e) if isinstance(e, list) and e and isinstance(e[0], str) else str(e).lower() in o.lower() if isinstance(e, str) else o.strip() == target(s).strip())
        if o.strip() != target(s).strip() and bad < show: bad += 1; print("   miss", name, repr(o[:110]), "| want", repr(target(s)[:110]), flush=True)
    R[name] = dict(n=tot, exact=round(ok / tot, 3), answer=round(con / tot, 3)); print(name, R[name], f"{time.time() - t0:.0f}s", flush=True)
    json.dump(R, open(a.out, "w"), indent=1)
def only(f, *tasks):
    def g(rng):
        s = f(rng); return s if s["task"] in tasks else None
    return g
def multi(kind):
    def g(rng): return data.image_qa(rng, n=rng.choice([2, 3, 4]), force=kind)
    return g
N = a.n
if "load" in parts:
    from mlx_lm import load as lm_load, generate as lm_gen
    for d in ("main", "draft"):
        t = time.time(); m, tk = lm_load(f"{a.root}/{d}"); p = tk.apply_chat_template([dict(role="user", content="Hello!")], add_generation_prompt=True)
        R[f"mlx_lm_{d}"] = dict(cls=type(m).__module__, load_s=round(time.time() - t, 2), hello=lm_gen(m, tk, prompt=p, max_tokens=20), tool_parser=str(getattr(tk, "tool_parser", None) and getattr(tk.tool_parser, "__module__", ""))); print(R[f"mlx_lm_{d}"], flush=True)
if "image" in parts:
    for k in ("what", "color", "shape", "oneword", "where", "yesno", "count", "back"): run("img1_" + k, lambda r, k=k: data.image_qa(r, n=1, force=k), N, 1)
    run("img_number", data.image_number, N); run("img_plain", data.image_plain, N // 2); run("img_two", data.image_two, N)
    for k in ("what", "count", "colorof", "howmany", "side", "leftof", "extreme", "yesno"): run("imgN_" + k, multi(k), N // 2, 1)
if "needle" in parts:
    for T, n in [tuple(map(int, x.split(":"))) for x in a.needle.split(",")]:
        def f(r, T=T):
            s = data.retrieval(r, T * .9, single=True); return s
        run(f"needle_{T}", f, n, 1)
if "tasks" in parts:
    for nm, f in (("tool_call", only(data.tools_task, "tool_call")), ("tool_parallel", only(data.tools_task, "tool_parallel")), ("tool_final", only(data.tools_task, "tool_final")), ("tool_none", only(data.tools_task, "tool_none")), ("json", data.json_task),
                  ("arith", lambda r: data.arith(r, False)), ("arith_think", lambda r: data.arith(r, True)), ("listops", data.listops), ("chat_facts", only(data.chat, "chat_facts")), ("chat_style", only(data.chat, "chat_style")), ("chat_persona", only(data.chat, "chat_persona")),
                  ("chat_memory", only(data.chat, "chat_memory")), ("chat_open", only(data.chat, "chat_open")), ("chat_story", only(data.chat, "chat_story")), ("retrieval_short", lambda r: data.retrieval(r, 200))): run(nm, f, N if nm != "chat_story" else 10)
if "mtp" in parts:
    from mlx_vlm.speculative.drafters import load_drafter
    dr, kind = load_drafter(a.root + "/main"); print("drafter", type(dr).__name__, kind, dr.config.block_size)
    M = {}
    for bs in map(int, a.bs.split(",")):
        dr.config.block_size = bs
        for nm, f, n in (("chat", data.chat, 12), ("story", only(data.chat, "chat_story"), 4), ("tools", data.tools_task, 10), ("json", data.json_task, 8), ("arith_think", lambda r: data.arith(r, True), 8), ("retrieval", lambda r: data.retrieval(r, 300, single=True), 8), ("needle_2k", lambda r: data.retrieval(r, 1800, single=True), 3), ("image", data.image_qa, 8)):
            n = max(2, int(n * a.mtpscale)); rng = random.Random(f"mtp{nm}"); acc = drafted = rounds = same = ntok = 0; tp = tm = 0.0
            for _ in range(n):
                s = f(rng)
                while s is None or s["task"] == "video": s = f(rng)
                t0 = time.time(); A = [int(x.token) for x in stream_generate(model, proc, prompt(s), max_tokens=140, temperature=0.0, **kw(s)) if x.token is not None]; tp += time.time() - t0
                t0 = time.time(); B = [int(x.token) for x in stream_generate(model, proc, prompt(s), max_tokens=140, temperature=0.0, draft_model=dr, draft_kind=kind, **kw(s)) if x.token is not None]; tm += time.time() - t0
                same += A == B; acc += sum(dr.accept_lens); rounds += len(dr.accept_lens); drafted += sum(dr.draft_lens) if dr.draft_lens else len(dr.accept_lens) * (bs - 1); ntok += len(B)
            M[f"{nm}_bs{bs}"] = dict(n=n, same=same, tokens=ntok, rounds=rounds, accepted=acc, drafted=drafted, rate=round(acc / max(1, drafted), 3), tok_per_round=round(ntok / max(1, rounds), 2), plain_s=round(tp, 2), mtp_s=round(tm, 2)); print(nm, bs, M[f"{nm}_bs{bs}"], flush=True)
    R["mtp"] = M; json.dump(R, open(a.out, "w"), indent=1)
if "speed" in parts:
    rng = random.Random(5); sp = {}
    for T in (500, 2000, 8000):
        s = data.retrieval(rng, T, single=True); r = gen(s, 40); sp[f"prefill_{r.prompt_tokens}"] = round(r.prompt_tps, 1)
    s = data.S([data.U("Tell me a story about a fox."), data.A("x")], "x"); r = gen(s, 130); sp["decode_tok_s"] = round(r.generation_tps, 1); sp["decode_n"] = r.generation_tokens
    R["speed"] = sp; print(sp, flush=True); json.dump(R, open(a.out, "w"), indent=1)
if "draft" in parts:
    from mlx_lm import load as lm_load, generate as lm_gen
    m, tk = lm_load(a.root + "/draft"); D = {}
    for T, n in ((512, 20), (2048, 10), (4096, 6), (8192, 4)):
        rng = random.Random(f"dr{T}"); ok = 0
        for _ in range(n):
            s = data.retrieval(rng, T * .9, single=True); o = lm_gen(m, tk, prompt=tk.encode(prompt(s), add_special_tokens=False), max_tokens=60); ok += str(s["expect"]) in o
        D[T] = f"{ok}/{n}"
    R["draft_needle"] = D; print(D, flush=True); json.dump(R, open(a.out, "w"), indent=1)
if "torch" in parts and a.torch and os.path.exists(a.torch):
    sys.modules.setdefault("torch", None)
    src = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "eval_torch.py")).read(); ns = dict(random=random, data=data, SEED=777001); exec(src[src.index("def prompts"):src.index("def main")], ns)
    T = json.load(open(a.torch)); P = [s for s in ns["prompts"]() if s["task"] != "video"]
    for dt, outs in T.items():
        mis = []
        for s, o in zip(P, outs):
            g = clean(gen(s, 120).text)
            if g.strip() != o.strip(): mis.append([s["task"], g, o])
        R[f"torch_{dt}"] = dict(n=len(outs), equal=len(outs) - len(mis), mismatches=mis); print(dt, R[f"torch_{dt}"], flush=True)
json.dump(R, open(a.out, "w"), indent=1); print("saved", a.out)
