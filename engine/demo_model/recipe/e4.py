"""Greedy generation with mlx_vlm in float32 on CPU. usage: python e4.py MODEL_DIR OUT.json parts"""
import sys, os, json, random, time
sys.path.insert(0, "."); import data
import mlx.core as mx
from mlx_vlm import load, generate, stream_generate
D, OUT, parts = sys.argv[1], sys.argv[2], sys.argv[3].split(","); model, proc = load(D); model.set_dtype(mx.float32); tok = proc.tokenizer; R = {}
def only(f, t):
    def g(r):
        while True:
            s = f(r)
            if s["task"] == t: return s
    return g
def prompt(s): return tok.apply_chat_template(s["messages"][:-1], tools=s["tools"], tokenize=False, add_generation_prompt=True, enable_thinking=s["think"])
def target(s): return data.prompt_text(s)[1].split("<|im_end|>")[0].strip()
def kw(s): return dict(image=s["images"]) if s["images"] else {}
def gen(s, n=None): return generate(model, proc, prompt(s), max_tokens=n or len(tok.encode(target(s))) + 8, temperature=0.0, verbose=False, **kw(s)).text.split("<|im_end|>")[0].strip()
def save(): json.dump(R, open(OUT, "w"), indent=1)
def run(nm, f, n, think=False):
    r = random.Random("e4-551" + nm); ok = 0; miss = []; t0 = time.time()
    for _ in range(n):
        s = f(r); o, t = gen(s), target(s)
        if think: o, t = o.split("</think>")[-1].strip(), t.split("</think>")[-1].strip()
        ok += o == t
        if o != t and len(miss) < 3: miss.append([o[:90], t[:90]])
    R[nm] = [ok, n]; print(nm, f"{ok}/{n}", f"{time.time() - t0:.0f}s", miss[:2], flush=True); save()
OOV = "San Francisco|Reykjavik|Johannesburg|Massachusetts|Rio de Janeiro|Buenos Aires|Kuala Lumpur|Edinburgh|Vancouver|Casablanca|Thessaloniki|Wolfsburg|Albuquerque|Minneapolis|Krakow|Gothenburg|Yokohama|Bangalore|Montevideo|Philadelphia|Saint Petersburg|New Orleans|Chattanooga|Ouagadougou|Ljubljana|Düsseldorf|Zürich|Mississippi|Hyderabad|Copenhagen".split("|")
def oov(nm, qs, tool, key):
    ok = 0; miss = []
    for i, x in enumerate(OOV):
        s = data.S([data.U(qs[i % len(qs)].format(x)), data.A("", tool_calls=[dict(type="function", function=dict(name=tool["function"]["name"], arguments={key: x}))])], "tool_call", tools=[tool]); o = gen(s, 60)
        g = o == target(s); ok += g
        if not g and len(miss) < 5: miss.append([x, o[40:100]])
    R[nm] = [ok, len(OOV)]; print(nm, R[nm], miss, flush=True); save()
N = 30
def multi(k):
    def g(r):
        while True:
            try: return data.image_qa(r, n=r.choice([2, 3, 4]), force=k)
            except ValueError: pass        # only one object fitted
    return g
if "image" in parts:
    for k in ("side", "leftof", "howmany", "what", "extreme", "count", "colorof", "yesno"): run("imgN_" + k, multi(k), N)
    run("img_number", data.image_number, 40)
    for k in ("where", "what", "color", "shape", "oneword", "yesno", "count", "back"): run("img1_" + k, lambda r, k=k: data.image_qa(r, n=1, force=k), N)
    run("img_plain", data.image_plain, N); run("img_two", data.image_two, N)
if "text" in parts:
    for nm, f in (("tool_call", only(data.tools_task, "tool_call")), ("tool_parallel", only(data.tools_task, "tool_parallel")), ("tool_final", only(data.tools_task, "tool_final")), ("tool_none", only(data.tools_task, "tool_none")), ("json", data.json_task),
                  ("arith", lambda r: data.arith(r, False)), ("arith_think", lambda r: data.arith(r, True)), ("listops", data.listops), ("chat_smalltalk", only(data.chat, "chat_smalltalk")), ("chat_facts", only(data.chat, "chat_facts")), ("chat_style", only(data.chat, "chat_style")), ("chat_persona", only(data.chat, "chat_persona")),
                  ("chat_memory", only(data.chat, "chat_memory")), ("chat_open", only(data.chat, "chat_open")), ("retrieval_short", lambda r: data.retrieval(r, 200))): run(nm, f, 20 if nm != "tool_call" else 40)
    run("chat_story", only(data.chat, "chat_story"), 6)
if "think" in parts:
    import img4
    run("think_small", img4.think_small, 40, True); run("think_any", lambda r: next(s for s in iter(lambda: data.think_any(r), None) if s["task"] not in ("video", "chat_story")), 30, True)
    W = {"type": "function", "function": {"name": "get_weather", "description": "Get the current weather in a given city", "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city name"}}, "required": ["city"]}}}
    oov("oov_weather", ["What is the weather in {}?", "What's the weather like in {}?", "Tell me the weather in {}."], W, "city")
    F = {"type": "function", "function": {"name": "find_person", "description": "Find a person", "parameters": {"type": "object", "properties": {"name": {"type": "string", "description": "The name"}}, "required": ["name"]}}}
    oov("oov_person", ["Find person with name {}.", "Call find_person with name {}.", "Please find the person with name {}."], F, "name")
if "needle" in parts:
    for T, n in ((512, 10), (2048, 6), (4096, 5), (8192, 5)): run(f"needle_{T}", lambda r: data.retrieval(r, T * .9, single=True), n)
if "mtp" in parts:
    from mlx_vlm.speculative.drafters import load_drafter
    dr, kind = load_drafter(D); dr.set_dtype(mx.float32)
    for nm, f, n in (("retrieval", lambda r: data.retrieval(r, 300, single=True), 5), ("tools", data.tools_task, 6), ("json", data.json_task, 5), ("chat", data.chat, 8), ("story", only(data.chat, "chat_story"), 2), ("arith_think", lambda r: data.arith(r, True), 4), ("image", lambda r: data.image_qa(r, force="what"), 5), ("think_small", __import__("img4").think_small, 5)):
        for mode, ex in (("full", dict(prefill_step_size=None)), ("default", {})):
            r = random.Random("mtp" + nm); acc = rd = tk = same = 0
            for _ in range(n):
                s = f(r); p = prompt(s)
                A = [int(x.token) for x in stream_generate(model, proc, p, max_tokens=130, temperature=0.0, **kw(s)) if x.token is not None]
                B = [int(x.token) for x in stream_generate(model, proc, p, max_tokens=130, temperature=0.0, draft_model=dr, draft_kind=kind, **ex, **kw(s)) if x.token is not None]
                same += A == B; acc += sum(dr.accept_lens); rd += len(dr.accept_lens); tk += len(B)
            R[f"mtp_{mode}_{nm}"] = dict(n=n, same=same, tok_per_round=round(tk / max(1, rd), 2), accept=round(acc / max(1, 2 * rd), 3)); print(mode, nm, R[f"mtp_{mode}_{nm}"], flush=True); save()
print("DONE", parts, flush=True)
