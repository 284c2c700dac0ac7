"""Train main or draft. Example (GPU):
 python train.py --arch main --seconds 540 --total 1500 --ckpt work/main.pt --out out --compile
The learning-rate schedule follows elapsed training seconds / --total, so a run may be cut into several calls (--ckpt resumes)."""
import argparse, json, math, os, random, time, collections
import numpy as np
import torch, torch.nn.functional as F
import batches, data, model
from model import Net, MAIN, DRAFT


class Opt:
    """Muon (batched Newton-Schulz, rms-matched to Adam) on hidden matrices, AdamW on the rest."""
    def __init__(self, net, lr, wd=0.05):
        self.lr, self.wd, self.t = lr, wd, 0
        mu, ad = [], []
        for k, p in net.named_parameters():
            (mu if p.ndim == 2 and min(p.shape) >= 64 and "embed" not in k else ad).append(p)
        self.groups = collections.defaultdict(list)
        vis = {id(p) for k, p in net.named_parameters() if "visual" in k}
        for p in mu: self.groups[(*p.shape, id(p) in vis)].append(p)     # the vision tower gets no gradient in text-only steps
        self.mom = {s: torch.zeros(len(ps), *s[:2], device=ps[0].device) for s, ps in self.groups.items()}
        self.ad = torch.optim.AdamW(ad, lr=lr, betas=(.9, .98), eps=1e-10, weight_decay=0.0, fused=ad[0].is_cuda)
        self.params = mu + ad

    @torch.no_grad()
    def step(self, f):
        gn = torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        for g in self.ad.param_groups: g["lr"] = self.lr * f
        self.ad.step()
        for s, ps in self.groups.items():
            if ps[0].grad is None: continue
            m = self.mom[s]; s = s[:2]; g = torch.stack([p.grad for p in ps]); m.lerp_(g, .05); u = g.lerp(m, .95)
            x = u.bfloat16() if u.is_cuda else u
            tr = s[0] > s[1]
            if tr: x = x.mT
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                A = x @ x.mT; B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315); x = torch.baddbmm(x, B, x, beta=3.4445)
            if tr: x = x.mT
            lr = self.lr * f; sc = .2 * math.sqrt(max(s))
            for p, d in zip(ps, x.float()): p.mul_(1 - lr * self.wd).add_(d, alpha=-lr * sc)
        for p in self.params: p.grad = None
        return gn

    def state(self): return dict(mom=self.mom, ad=self.ad.state_dict())
    def load(self, s): self.mom = s["mom"]; self.ad.load_state_dict(s["ad"])


def plan_main(i, warm=400):
    if i < warm: return 512
    r = random.Random(i * 31 + 7).random()
    if i < 3 * warm: return 512 if r < .85 else (1024 if r < .95 else 2048)
    return 512 if r < .79 else 1024 if r < .84 else 2048 if r < .89 else 4096 if r < .94 else 8192 if r < .98 else 16384


def plan4(i):
    r = random.Random(i * 31 + 7).random()
    return 512 if r < .88 else 1024 if r < .90 else 2048 if r < .925 else 4096 if r < .96 else 8192 if r < .99 else 16384


def plan_draft(i, warm=300):
    if i < warm: return 512
    r = random.Random(i * 31 + 7).random()
    return 512 if r < .50 else 1024 if r < .63 else 2048 if r < .76 else 4096 if r < .87 else 8192 if r < .96 else 16384


def ident(x): return x


def put(b, dev):
    o = {k: (torch.from_numpy(v).to(dev) if isinstance(v, np.ndarray) else v) for k, v in b.items()}
    for k, v in o.items():
        if torch.is_tensor(v) and k not in ("px", "w", "vw"): o[k] = v.long()
    if b["packed"]:
        d = o["doc"].view(b["B"], b["T"]); T = b["T"]
        m = (d[:, :, None] == d[:, None, :]) & torch.ones(T, T, dtype=torch.bool, device=d.device).tril()
        o["mask"] = m[:, None]
    else: o["mask"] = None
    return o


@torch.no_grad()
def evaluate(net, dev, tokens, arch, seed=999, n=3, longs=(1024, 2048, 4096, 8192)):
    """Teacher-forced exact match per document's last assistant turn (equals greedy exact match) + MTP agreement."""
    R = collections.defaultdict(lambda: [0, 0, 0, 0, 0, 0]); E = net.text[0].embed_tokens.weight
    for T in (512,) * n + tuple(longs):
        b = put(batches.make(seed, 10 ** 6 + T + n * 17 if T > 512 else 10 ** 6 + n, T, tokens, arch, single=T > 512), dev); n -= T == 512
        h = net.forward(b); i1, w1 = net.shifted(b, 1)
        dt = torch.bfloat16 if h.is_cuda else h.dtype
        am = (h.to(dt) @ E.to(dt).t()).argmax(-1); ok = (am == i1).cpu(); w = w1.cpu()
        if arch == "main":
            cs = net.cossin(b["pid"]); i2, w2 = net.shifted(b, 2); g = net.mtp_forward(h, E[i1], b, cs)
            mk = ((g.to(dt) @ E.to(dt).t()).argmax(-1) == i2).cpu(); w2 = w2.cpu()
            i3, w3 = net.shifted(b, 3); g = net.mtp_forward(g, E[i2], b, cs); mk2 = ((g.to(dt) @ E.to(dt).t()).argmax(-1) == i3).cpu()
        for o, m, task, kind in b["spans"]:
            if T > 512: task = f"needle_{T}"
            ww = w[o:o + m - 1] > .9; r = R[task]
            if not ww.any():
                continue
            last = int(ww.nonzero()[-1]); st = last
            while st > 0 and ww[st - 1]: st -= 1
            r[0] += 1; r[1] += bool(ok[o + st:o + last + 1].all()); r[2] += int(ww.sum()); r[3] += int(ok[o:o + m - 1][ww].sum())
            if arch == "main":
                q = w2[o:o + m - 2] > .9; r[4] += int(mk[o:o + m - 2][q].sum()); r[5] += int(mk2[o:o + m - 2][q].sum())
    return {k: dict(n=v[0], em=round(v[1] / max(1, v[0]), 4), tok=round(v[3] / max(1, v[2]), 4), mtp=round(v[4] / max(1, v[2]), 3), mtp2=round(v[5] / max(1, v[2]), 3)) for k, v in sorted(R.items())}


def save_split(net, out, name):
    """bf16 weights in parts of about 12 MiB."""
    if not out: return
    sd = {k: v.detach().to(torch.bfloat16 if "A_log" not in k else torch.float32).cpu() for k, v in net.state_dict().items()}
    cur, size, i = {}, 0, 0
    for k, v in sd.items():
        s = v.numel() * v.element_size()
        if size + s > 12 << 20: torch.save(cur, f"{out}/{name}.{i}.pt"); cur, size, i = {}, 0, i + 1
        cur[k] = v; size += s
    torch.save(cur, f"{out}/{name}.{i}.pt")


def main():
    ap = argparse.ArgumentParser()
    for k, v in dict(arch="main", seconds=60.0, total=60.0, lr=3e-3, tokens=65536, seed=1, ckpt="", out="", steps=10 ** 9, workers=12, init="", log=50, evaln=3, warm=100, decay=0.35, skip=0, ft=0.0, ckevery=150.0, mix="").items():
        ap.add_argument("--" + k, type=type(v), default=v)
    ap.add_argument("--compile", action="store_true"); ap.add_argument("--cpu", action="store_true"); ap.add_argument("--evalonly", action="store_true")
    a = ap.parse_args(); t00 = time.time()
    dev = "cpu" if a.cpu else "cuda"; model.COMPILE = a.compile
    if os.environ.get("BACKEND"): model.BACKEND = os.environ["BACKEND"]
    torch.manual_seed(a.seed); torch.set_float32_matmul_precision("high")
    net = Net(MAIN if a.arch == "main" else DRAFT).to(dev)
    print("params", sum(p.numel() for p in net.parameters()), {k: sum(p.numel() for n_, p in net.named_parameters() if k in n_) for k in ("embed_tokens", "visual", "mtp")}, flush=True)
    if a.init:
        import glob
        sd = {}
        for f in sorted(glob.glob(a.init)): sd.update(torch.load(f, map_location="cpu"))
        net.load_state_dict({k: v.float() for k, v in sd.items()}); print("init from", a.init)
    opt = Opt(net, a.lr); step, elapsed = a.skip, 0.0
    if a.ckpt and os.path.exists(a.ckpt):
        c = torch.load(a.ckpt, map_location=dev); net.load_state_dict(c["net"]); opt.load(c["opt"]); step, elapsed = c["step"], c["elapsed"]; print("resumed", step, elapsed, flush=True)
    plan = plan4 if a.mix else plan_main if a.arch == "main" else plan_draft
    import multiprocessing; batches.PHASE = multiprocessing.Value("i", 0)
    if a.ft and elapsed >= a.total - a.ft - 3: batches.PHASE.value = 1
    if a.evalonly: print(json.dumps(evaluate(net, dev, a.tokens, a.arch, n=a.evaln), indent=0)); return
    dl = iter(torch.utils.data.DataLoader(batches.Stream(a.seed, plan, a.tokens, a.mix or a.arch, step), batch_size=None, num_workers=a.workers, prefetch_factor=6 if a.workers else None, collate_fn=ident))
    b = next(dl); print("first batch after", round(time.time() - t00, 1), "s", flush=True)
    t0 = time.time(); last = t0; acc = collections.defaultdict(list); kt = collections.defaultdict(list); wait = 0.0; s0 = step; lastck = t0
    logf = None
    while time.time() - t0 < a.seconds and step - s0 < a.steps:
        fr = min(1.0, (elapsed + time.time() - t0) / a.total)
        f = min(1.0, (step + 1 - a.skip) / a.warm) * (1.0 if fr < 1 - a.decay else max(0.01, (1 - fr) / a.decay))
        if a.ft and not batches.PHASE.value and elapsed + time.time() - t0 > a.total - a.ft: batches.PHASE.value = 1; print("ft mix from step", step, flush=True)
        g = put(b, dev); tot, parts = net.loss(g); tot.backward(); gn = opt.step(f); step += 1
        for k, v in parts.items(): acc[k + ("" if b["T"] == 512 else "_long")].append(v.detach())
        T = b["T"]; w0 = time.time(); b = next(dl); wait += time.time() - w0
        if step - s0 <= 12 or step % a.log == 0:
            if dev == "cuda": torch.cuda.synchronize()
            now = time.time(); k = 1 if step - s0 <= 12 else min(a.log, step - s0 - 12)
            s = f"{step} T{T} t{now - t0:.0f} f{f:.2f} {1000 * (now - last) / k:.0f}ms/step wait{1000 * wait / k:.0f} gn{float(gn):.2f} " + " ".join(f"{n_}={torch.stack(v).mean().item():.3f}" for n_, v in acc.items())
            print(s, flush=True); last = now; wait = 0.0; acc.clear()
            if logf: logf.write(s + "\n"); logf.flush()
        if a.ckpt and time.time() - lastck > a.ckevery: 
            torch.save(dict(net=net.state_dict(), opt=opt.state(), step=step, elapsed=elapsed + time.time() - t0), a.ckpt + ".tmp"); os.replace(a.ckpt + ".tmp", a.ckpt); save_split(net, a.out, a.arch); lastck = time.time()
    elapsed += time.time() - t0
    if a.ckpt: torch.save(dict(net=net.state_dict(), opt=opt.state(), step=step, elapsed=elapsed), a.ckpt)
    save_split(net, a.out, a.arch)
    print("steps", step, "elapsed", round(elapsed, 1), "peak GB", round(torch.cuda.max_memory_allocated() / 1e9, 1) if dev == "cuda" else "", flush=True)
    del dl
    if a.evaln:
        model.COMPILE = False
        ev = evaluate(net, dev, a.tokens, a.arch, n=a.evaln)
        for k, v in ev.items(): print(k, v, flush=True)
        if a.out: json.dump(ev, open(f"{a.out}/{a.arch}_eval.json", "w"))


if __name__ == "__main__": main()
