//! A plan can run a part of a stage's layers: parts that follow each other, each in sessions of its own, give the states of the
//! whole stage, bit for bit.

use engine::{
    CoordinatorStage, Executor, ExecutorError, LocalExecutor, Phase, Prefix, RequestedOutput, Stage, StepOutput,
    StepPlan, TenantId, page_hashes,
};
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, LoadOptions, ModelPart};
use testing::oracle_model::{LIMITS, oracle_models, oracle_prompts};
use types::{LayerRange, SessionId, TokenId};

const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };
/// The last tokens of each sequence, which are decoded.
const DECODED: usize = 4;

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

fn range(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).unwrap()
}

fn all_layers(checkpoint: &Checkpoint) -> LayerRange {
    range(0, checkpoint.description().layers.len() as u32)
}

fn stage(checkpoint: &Checkpoint, layers: LayerRange) -> Stage<CpuBackend> {
    Stage::load(backend(), checkpoint, &OPTIONS, layers, &mut |_| {}).unwrap()
}

/// The embeddings of each prompt's tokens.
fn activations(checkpoint: &Checkpoint, prompts: &[Vec<TokenId>]) -> Vec<Vec<f32>> {
    let mut coordinator =
        CoordinatorStage::load(backend(), checkpoint, &OPTIONS, ModelPart::coordinator(0), &mut |_| {}).unwrap();
    let embed = |prompt: &Vec<TokenId>| {
        let (mut plan, mut rows) = (StepPlan::new(), Vec::new());
        let session = coordinator.open(prompt.len(), Prefix::NONE).unwrap().session;
        plan.push(session, Phase::Prefill, 0, prompt, RequestedOutput::Nothing);
        coordinator.start(&plan, &mut rows).unwrap();
        coordinator.close(session);
        rows
    };
    prompts.iter().map(embed).collect()
}

/// Sequences that run through parts of one stage, one part after another.
struct Parts<'a> {
    stage: &'a mut Stage<CpuBackend>,
    layers: &'a [Option<LayerRange>],
    /// Of each sequence, one session for each part.
    sessions: Vec<Vec<SessionId>>,
    computed: Vec<usize>,
    found: Vec<Vec<u32>>,
}

impl<'a> Parts<'a> {
    fn new(stage: &'a mut Stage<CpuBackend>, layers: &'a [Option<LayerRange>], sequences: usize) -> Self {
        let mut open = || stage.open(LIMITS.positions, Prefix::NONE).unwrap().session;
        let sessions = (0..sequences).map(|_| layers.iter().map(|_| open()).collect()).collect();
        Self { stage, layers, sessions, computed: vec![0; sequences], found: vec![Vec::new(); sequences] }
    }

    /// Runs all rows of the sequences, in chunks and together. Keeps the states of all rows.
    fn run(&mut self, sequences: &[Vec<f32>]) {
        let width = self.stage.width();
        let next = |index: usize, at: usize| match sequences[index].len() / width - at {
            0 => None,
            left if left <= DECODED => Some((Phase::Decode, 1)),
            left => Some((Phase::Prefill, (7 + 4 * index).min(left - DECODED))),
        };
        loop {
            let entries = (0..sequences.len()).filter_map(|index| Some((next(index, self.computed[index])?, index)));
            let mut entries: Vec<_> = entries.collect();
            entries.sort();
            if entries.is_empty() {
                return;
            }
            let rows = entries.iter().flat_map(|&((_, rows), index)| {
                let start = self.computed[index];
                &sequences[index][start * width..(start + rows) * width]
            });
            let mut states = self.step(&entries, rows.copied().collect());
            for ((_, rows), index) in entries {
                self.computed[index] += rows;
                let after = states.split_off(rows * width);
                self.found[index].extend(states.iter().map(|value| value.to_bits()));
                states = after;
            }
        }
    }

    fn step(&mut self, entries: &[((Phase, usize), usize)], mut states: Vec<f32>) -> Vec<f32> {
        let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
        for (part, &layers) in self.layers.iter().enumerate() {
            plan.clear();
            plan.set_layers(layers);
            for &((phase, rows), index) in entries {
                let (session, position) = (self.sessions[index][part], self.computed[index]);
                plan.push_rows(session, phase, position, rows, RequestedOutput::States { rows });
            }
            plan.activations_mut().append(&mut states);
            self.stage.submit(&plan).unwrap();
            self.stage.collect(&mut output).unwrap();
            states.append(&mut output.states);
        }
        states
    }

    fn truncate(&mut self, tokens: usize) {
        for (index, sessions) in self.sessions.iter().enumerate() {
            let kept = tokens.min(self.computed[index]);
            sessions.iter().for_each(|&session| assert_eq!(self.stage.truncate(session, tokens).unwrap(), kept));
            self.computed[index] = kept;
            self.found[index].truncate(kept * self.stage.width());
        }
    }
}

/// The states of all rows: computed, and computed again from the middle of a page.
fn states(stage: &mut Stage<CpuBackend>, layers: &[Option<LayerRange>], sequences: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let mut parts = Parts::new(stage, layers, sequences.len());
    parts.run(sequences);
    let first = parts.found.clone();
    parts.truncate(5);
    parts.run(sequences);
    let again = parts.found.concat();
    let sessions = parts.sessions.concat();
    sessions.into_iter().for_each(|session| stage.close(session));
    assert_eq!(stage.capacity().pages_free, LIMITS.kv_pages);
    [first, vec![again]].concat()
}

#[test]
fn the_parts_of_one_stage_give_the_bits_of_the_whole_for_every_oracle_model() {
    for path in oracle_models() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let all = all_layers(&checkpoint);
        let count = all.count() as u32;
        let long_enough = |prompt: &Vec<TokenId>| prompt.len() > 2 * DECODED;
        let prompts: Vec<_> = oracle_prompts(&path)
            .into_iter()
            .filter(long_enough)
            .take(5)
            .map(|mut prompt| {
                prompt.truncate(40);
                prompt
            })
            .collect();
        assert!(prompts.len() > 1);
        let sequences = activations(&checkpoint, &prompts);
        let mut stage = stage(&checkpoint, all);
        let whole = states(&mut stage, &[None], &sequences);
        let halves = [Some(range(0, count / 2)), Some(range(count / 2, count))];
        let single: Vec<_> = (0..count).map(|layer| Some(range(layer, layer + 1))).collect();
        for layers in [&halves[..], &single, &[Some(all)]] {
            assert!(states(&mut stage, layers, &sequences) == whole, "{path:?} as {layers:?}");
        }
    }
}

#[test]
fn layers_that_a_plan_cannot_have_are_refused_before_anything_changes() {
    let path = oracle_models().into_iter().find(|path| path.ends_with("qwen3/model-f32")).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut stage = stage(&checkpoint, range(1, 4));
    let session = stage.open(100, Prefix::NONE).unwrap().session;
    let plan = |position, layers| {
        let mut plan = StepPlan::new();
        plan.push_rows(session, Phase::Prefill, position, 3, RequestedOutput::States { rows: 1 });
        plan.activations_mut().resize(3 * checkpoint.description().hidden, 0.5);
        plan.set_layers(Some(layers));
        plan
    };
    for layers in [range(0, 1), range(0, 2), range(3, 5), range(4, 9)] {
        let error = stage.submit(&plan(0, layers)).unwrap_err();
        assert!(matches!(error, ExecutorError::UnknownLayers { layers: found } if found == layers), "{error}");
    }
    stage.submit(&plan(0, range(2, 4))).unwrap();
    stage.collect(&mut StepOutput::new()).unwrap();
    let error = stage.submit(&plan(3, range(1, 4))).unwrap_err();
    assert!(matches!(error, ExecutorError::OtherLayers(found) if found == session), "{error}");
    stage.submit(&plan(3, range(3, 4))).unwrap();

    let mut model = LocalExecutor::load(backend(), &checkpoint, &OPTIONS, &mut |_| {}).unwrap();
    let session = model.open(100, Prefix::NONE).unwrap().session;
    let mut plan = StepPlan::new();
    plan.push(session, Phase::Prefill, 0, &[TokenId(1)], RequestedOutput::Logits { rows: 1 });
    plan.set_layers(Some(range(0, 1)));
    let error = model.submit(&plan).unwrap_err();
    assert!(matches!(error, ExecutorError::PartOfLayers { .. }), "{error}");
    plan.set_layers(None);
    model.submit(&plan).unwrap();
}

#[test]
fn what_a_part_computed_is_no_prefix_of_other_sessions() {
    let path = oracle_models().into_iter().find(|path| path.ends_with("qwen3/model-f32")).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut stage = stage(&checkpoint, all_layers(&checkpoint));
    let tokens: Vec<_> = (0..70).map(TokenId).collect();
    let pages = page_hashes(TenantId(0), &tokens, stage.capacity().page_tokens);
    let prefix = Prefix { tokens: &[], pages: &pages, reuse_max: 64 };
    for (layers, found) in [(Some(range(0, 2)), 0), (None, 0), (Some(range(2, 4)), 64)] {
        let opened = stage.open(100, prefix).unwrap();
        assert_eq!(opened.computed, found, "before {layers:?}");
        let rows = tokens.len() - found;
        let mut plan = StepPlan::new();
        plan.push_rows(opened.session, Phase::Prefill, found, rows, RequestedOutput::States { rows: 1 });
        plan.activations_mut().resize(rows * checkpoint.description().hidden, 0.5);
        plan.set_layers(layers);
        stage.submit(&plan).unwrap();
        stage.collect(&mut StepOutput::new()).unwrap();
        stage.close(opened.session);
    }
}
