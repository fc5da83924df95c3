//! Measures a step of a decoder with Qwen3-8B's shape on a GPU, op by op and as a captured graph.
//!
//! `cargo run --release -p kernels --features cuda --example cuda_decode`

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("built without the feature `cuda`");
}

#[cfg(feature = "cuda")]
fn main() -> Result<(), kernels::BackendError> {
    bench::main()
}

#[cfg(feature = "cuda")]
mod bench {
    use std::time::Instant;

    use kernels::cuda::{CudaBackend, CudaStep};
    use kernels::{Backend, BackendError, PAGE_TOKENS, Span, StepInputs, StepLimits};

    use testing::decoder_stack::{Sizes, Stack, Weights};

    const SIZES: Sizes = Sizes {
        layers: 36,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        inner: 12_288,
        vocab: 151_936,
        window: 1 << 20,
    };
    const POSITIONS: usize = 8192;
    const KV_PAGES: usize = 4096;
    const LIMITS: StepLimits = StepLimits { rows: 512, sequences: 64, pages: KV_PAGES };
    const ROUNDS: usize = 30;

    pub fn main() -> Result<(), BackendError> {
        let backend = CudaBackend::open(0)?;
        let start = Instant::now();
        let weights = Weights::noise(&SIZES, 1);
        println!("made one layer's weights in {:.1} s", start.elapsed().as_secs_f64());
        let start = Instant::now();
        let mut stack = Stack::load(&backend, &SIZES, &weights, LIMITS, KV_PAGES, POSITIONS)?;
        backend.synchronise()?;
        println!("loaded {} layers in {:.1} s", SIZES.layers, start.elapsed().as_secs_f64());
        let mut step = backend.step(LIMITS)?;

        println!("| sequences | rows each | from position | eager ms | graph ms | same bits |");
        println!("|---|---|---|---|---|---|");
        for (sequences, rows, position) in
            [(1, 1, 64), (1, 1, 512), (1, 1, 4096), (8, 1, 512), (64, 1, 512), (1, 512, 0)]
        {
            let begin = |step: &mut CudaStep, round: usize| begin(&backend, step, sequences, rows, position + round);
            let (all, logit_rows) = (sequences * rows, sequences);
            begin(&mut step, 0)?;
            stack.forward(&backend, &step, all, logit_rows);
            let eager_logits = logits(&backend, &stack, logit_rows)?;
            let eager = median((0..ROUNDS).map(|round| {
                let start = Instant::now();
                begin(&mut step, round)?;
                stack.forward(&backend, &step, all, logit_rows);
                backend.synchronise()?;
                Ok(1e3 * start.elapsed().as_secs_f64())
            }))?;
            let mut graph = backend.capture(|| stack.forward(&backend, &step, all, logit_rows))?;
            begin(&mut step, 0)?;
            backend.replay(&mut graph);
            let same = logits(&backend, &stack, logit_rows)? == eager_logits;
            let replayed = median((0..ROUNDS).map(|round| {
                let start = Instant::now();
                begin(&mut step, round)?;
                backend.replay(&mut graph);
                backend.synchronise()?;
                Ok(1e3 * start.elapsed().as_secs_f64())
            }))?;
            println!("| {sequences} | {rows} | {position} | {eager:.3} | {replayed:.3} | {same} |");
        }
        invariance(&backend, &mut stack, &mut step)
    }

    /// Reports whether a row's logits depend on the number of other rows in the step.
    fn invariance(
        backend: &CudaBackend,
        stack: &mut Stack<CudaBackend>,
        step: &mut CudaStep,
    ) -> Result<(), BackendError> {
        let mut first = |sequences, rows, position| {
            begin(backend, step, sequences, rows, position)?;
            stack.forward(backend, step, sequences * rows, sequences);
            logits(backend, stack, 1)
        };
        let apart = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let (last, alone) = (first(1, 512, 0)?, first(1, 1, 511)?);
        println!("the last row of 512 and alone: largest difference of a logit {:e}", apart(&last, &alone));
        let alone = first(1, 1, 300)?;
        for sequences in [2, 3, 4, 8, 16, 32, 64] {
            let together = first(sequences, 1, 300)?;
            println!("a row among {sequences} and alone: largest difference of a logit {:e}", apart(&together, &alone));
        }
        Ok(())
    }

    fn logits(backend: &CudaBackend, stack: &Stack<CudaBackend>, rows: usize) -> Result<Vec<f32>, BackendError> {
        let mut out = vec![0.0; rows * SIZES.vocab];
        backend.read(&stack.logits, 0..rows, &mut out)?;
        Ok(out)
    }

    /// Equal spans from `position` on, each with its own pages; the last row of each is a logit row.
    fn begin(
        backend: &CudaBackend,
        step: &mut CudaStep,
        sequences: usize,
        rows: usize,
        position: usize,
    ) -> Result<(), BackendError> {
        let pages_each = (position + rows).div_ceil(PAGE_TOKENS);
        let spans: Vec<Span> = (0..sequences)
            .map(|index| Span {
                row: (index * rows) as u32,
                rows: rows as u32,
                position: position as u32,
                pages_start: (index * pages_each) as u32,
                pages_len: pages_each as u32,
            })
            .collect();
        // Sequence `i` has the pages from `64 i` on, or from 0 when it is the only one.
        let page =
            |index: usize| index / pages_each * (KV_PAGES / sequences.next_power_of_two()).min(64) + index % pages_each;
        let pages: Vec<u32> = (0..sequences * pages_each).map(|index| page(index) as u32).collect();
        let tokens: Vec<u32> =
            (0..sequences * rows).map(|row| (7919 * (row + position) % SIZES.vocab) as u32).collect();
        let logit_rows: Vec<u32> = (1..=sequences).map(|index| (index * rows - 1) as u32).collect();
        backend.begin(step, StepInputs { tokens: &tokens, spans: &spans, pages: &pages, logit_rows: &logit_rows })
    }

    fn median(times: impl Iterator<Item = Result<f64, BackendError>>) -> Result<f64, BackendError> {
        let mut times = times.collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
