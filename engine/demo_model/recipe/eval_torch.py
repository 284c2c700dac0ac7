"""transformers greedy outputs on 20 held-out prompts -> JSON for eval.py; and needle recall of the draft's attention.
usage: python eval_torch.py ../final work/torch.json"""
import sys, json, random, torch, numpy as np
torch.set_num_threads(1)
import data, batches
from transformers import AutoModelForImageTextToText, AutoTokenizer
root, out = sys.argv[1], sys.argv[2]
SEED = 777001


def prompts():
    rng = random.Random(SEED); r = []
    for f in [data.chat] * 4 + [data.tools_task] * 3 + [data.json_task] * 2 + [data.arith] * 2 + [data.listops] * 2 + [lambda g: data.retrieval(g, 300, single=True)] * 2 + [data.image_qa] * 5: r.append(f(rng))
    return r


def main():
    tk = AutoTokenizer.from_pretrained(root + "/main"); res = {}
    for name, dt in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        m = AutoModelForImageTextToText.from_pretrained(root + "/main", dtype=dt).eval(); o = []
        for s in prompts():
            p, tgt = data.prompt_text(s); q = dict(s); q["messages"] = s["messages"]
            d = batches.encode(dict(s)); full = d["ids"]
            n_t = len(batches.tok().encode(tgt, add_special_tokens=False).ids)
            # prompt ids = everything before the last assistant turn's target
            k = len(full) - n_t - 1; ids = torch.from_numpy(full[:k])[None]; inp = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
            if s["images"]:
                px = torch.from_numpy(np.concatenate([a for a, _, _ in d["px"]])).float() / 127.5 - 1
                vid = s["task"] == "video"; g = torch.tensor([[1, a, b] for _, a, b in d["px"]])
                if vid: continue
                inp.update(pixel_values=px.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(len(px), -1).to(dt), image_grid_thw=g, mm_token_type_ids=(ids == batches.tok().img).int())
            with torch.no_grad(): g = m.generate(**inp, max_new_tokens=120, do_sample=False, eos_token_id=[2, 0], pad_token_id=0)
            o.append(tk.decode(g[0, k:], skip_special_tokens=False).split("<|im_end|>")[0])
        res[name] = o; print(name, len(o), flush=True)
    json.dump(res, open(out, "w"))


def draft_attention():
    """Share of needle sentences whose 32-token chunk is among the best 20% by draft attention of the last 8 prompt tokens."""
    from safetensors.torch import load_file
    import model; from model import Net, DRAFT, attn_pre; import torch.nn.functional as F
    net = Net(DRAFT); net.load_state_dict({k: v.float() for k, v in load_file(root + "/draft/model.safetensors").items()}); c = net.c
    rng = random.Random(SEED + 5)
    for tg in (1000, 2000, 4000, 8000):
        hit = {.1: 0, .2: 0, .3: 0}; n = 8
        for _ in range(n):
            while True:
                s = data.retrieval(rng, tg, single=True)
                if len(s["messages"]) == 2 and s["messages"][1]["content"] != s["expect"]: break
            p, tgt = data.prompt_text(s); ans = s["messages"][-1]["content"]
            e = batches.tok().encode(p, add_special_tokens=False); ids = torch.tensor(e.ids); at = p.find(s["expect"] if ans not in p else ans); offs = e.offsets
            pos = next(i for i, (a, b) in enumerate(offs) if a <= at < b or a >= at)
            B, T = 1, len(ids); pid = torch.arange(T); cs = net.cossin(pid)
            with torch.no_grad():
                x = net.model.embed_tokens.weight[ids]; sc = torch.zeros(T)
                for l in net.model.layers:
                    a = l.self_attn
                    q, k, v, _ = attn_pre(x, l.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.q_norm.weight, a.k_norm.weight, cs[0], cs[1], c.hd, False, c.eps)
                    w = torch.softmax(torch.einsum("qhd,khd->hqk", q[-24:], k.repeat_interleave(2, 1)) * c.hd ** -.5 + torch.full((24, T), -1e9).triu(T - 23), -1)
                    sc = torch.maximum(sc, w.amax((0, 1))); x = net.mlp_(net.attn(x, l, cs, None, 1, T, False), l, 0.0)
            ch = F.pad(sc, (0, -T % 32)).view(-1, 32).mean(-1); rank = int((ch > ch[pos // 32]).sum()) / len(ch)
            for t in hit: hit[t] += rank < t
        print("draft attention needle recall", tg, {t: f"{h}/{n}" for t, h in hit.items()}, flush=True)


if __name__ == "__main__":
    draft_attention(); main()
