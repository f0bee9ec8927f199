one = None
def code(kernel, dtype=torch.float32):
    s = FusedSampler(SamplerNeed(device=DeviceFacts(type="cuda", capability=(9,0)), vocab_size=128256, slots=2, max_length=100), interpreted=True)
    s._passes._fast = True
    s.open([SlotOpening(slot=0, sampling=SamplingParams(top_p=.9), seed=1, prompt=(1,2), max_length=100)])
    rows = SampleRows(slots=torch.zeros(2, dtype=torch.int64), positions=torch.zeros(2, dtype=torch.int64), host_slots=(0,))
    with cfor(90) as made: s.sample(torch.empty(2, 128256, dtype=dtype), rows)
    return next(o for o in made if o.kernel == kernel)
for k in ("read_chunks", "gather_candidates"):
    open(f"/work/scratch/samp/{k}.sass","w").write(code(k).code)
