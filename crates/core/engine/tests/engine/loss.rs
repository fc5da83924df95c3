//! An executor that loses its sessions: requests wait and continue with the same answers, within limits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{
    Capacity, Engine, EngineError, EngineOptions, EventKind, Executor, ExecutorError, Failure, FinishReason, Finished,
    Health, OpenedSession, Prefix, Request, SamplingParams, StepOutput, StepPlan,
};
use testing::fake_executor::{Fake, answer, prompt, safe};
use types::{SessionId, TokenId};

/// Far longer than a test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Loses all sessions in the steps `lost_at` and, while no step runs, after the steps `lost_after`. It is ready again after
/// `looks` polls of its health. It ends one of the sessions in the steps `preempted_at`, and opens a second one only after
/// `opened_after` steps.
struct Frail {
    inner: Fake,
    steps: usize,
    lost_at: Vec<usize>,
    lost_after: Vec<usize>,
    preempted_at: Vec<usize>,
    opened_after: usize,
    open: usize,
    looks: usize,
    looks_left: usize,
}

impl Frail {
    fn new(lost_at: &[usize], looks: usize) -> Self {
        Self {
            inner: whole(),
            steps: 0,
            lost_at: lost_at.to_vec(),
            lost_after: Vec::new(),
            preempted_at: Vec::new(),
            opened_after: 0,
            open: 0,
            looks,
            looks_left: 0,
        }
    }
}

fn whole() -> Fake {
    Fake::new(64, 400)
}

fn why() -> Arc<str> {
    "the toy broke".into()
}

impl Executor for Frail {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.inner.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        if self.open > 0 && self.steps < self.opened_after {
            return Err(ExecutorError::Opening);
        }
        self.open += 1;
        self.inner.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.inner.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.open = self.open.saturating_sub(1);
        self.inner.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.inner.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.steps += 1;
        if self.lost_at.contains(&self.steps) {
            self.inner = whole();
            self.looks_left = self.looks;
            return Err(ExecutorError::Lost { why: why() });
        }
        self.inner.collect(output)?;
        if self.preempted_at.contains(&self.steps)
            && let Some(sample) = output.samples.pop()
        {
            self.close(sample.session);
            output.preempted.push(sample.session);
        }
        Ok(())
    }

    fn poll_health(&mut self, _: Duration) -> Health {
        if let Some(index) = self.lost_after.iter().position(|&step| step == self.steps) {
            self.lost_after.remove(index);
            self.inner = whole();
            self.looks_left = self.looks;
        }
        if self.looks_left == 0 {
            return Health::Ready;
        }
        self.looks_left -= 1;
        Health::Rebuilding { why: why() }
    }
}

fn request(seed: u32) -> Request {
    Request { sampling: sampling(), ..Request::greedy(prompt(30, seed), 20) }
}

fn sampling() -> SamplingParams {
    safe(SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::default() })
}

/// The answers of two requests, and how they ended.
fn run(engine: &mut Engine<Frail>) -> Vec<(Vec<TokenId>, FinishReason)> {
    let ids = [engine.add(request(1)).unwrap(), engine.add(request(2)).unwrap()];
    let mut answers: Vec<_> = ids.iter().map(|_| (Vec::new(), None)).collect();
    let mut events = Vec::new();
    let begun = Instant::now();
    while !engine.is_idle() {
        assert!(begun.elapsed() < PATIENCE, "the engine never becomes idle: {answers:?}");
        let _ = engine.step(&mut events); // an error has ended every request, each with an event
        for event in events.drain(..) {
            let (tokens, ending) = &mut answers[ids.iter().position(|&id| id == event.request).unwrap()];
            match event.kind {
                EventKind::Token(sampled) => tokens.push(sampled.token),
                EventKind::Finished(Finished { reason, .. }) => *ending = Some(reason),
                _ => {}
            }
        }
    }
    answers.into_iter().map(|(tokens, ending)| (tokens, ending.unwrap())).collect()
}

#[test]
fn answers_are_the_same_however_often_sessions_are_lost() {
    let expected = [1, 2].map(|seed| answer(&prompt(30, seed), &sampling(), 20));
    for lost_at in [&[1][..], &[2], &[9], &[3, 4], &[5, 12, 20]] {
        for looks in [0, 1, 5] {
            let options = EngineOptions { chunk: 16, ..EngineOptions::default() };
            let mut engine = Engine::with_options(Frail::new(lost_at, looks), options);
            let answers = run(&mut engine);
            for ((tokens, ending), expected) in answers.iter().zip(&expected) {
                assert_eq!(tokens, expected, "lost at {lost_at:?}");
                assert!(matches!(ending, FinishReason::Length));
            }
            assert!(engine.stats().replays >= lost_at.len() as u64);
            assert!(engine.executor().inner.is_clean());
        }
    }
}

#[test]
fn a_request_whose_steps_are_all_lost_ends() {
    let all: Vec<usize> = (1..100).collect();
    let mut engine = Engine::new(Frail::new(&all, 1), 64);
    for (_, ending) in run(&mut engine) {
        let FinishReason::Failed(Failure::Executor(error)) = ending else { panic!("{ending:?}") };
        assert!(error.is_lost());
    }
    assert_eq!(engine.health(), Health::Rebuilding { why: why() });
}

#[test]
fn a_request_that_is_only_present_at_losses_goes_on() {
    // The first prompt takes the whole chunk, so the second request has a session without rows in the steps that are lost.
    let mut engine = Engine::new(Frail::new(&[1, 2, 3, 4], 1), 16);
    let answers = run(&mut engine);
    assert!(matches!(answers[0].1, FinishReason::Failed(Failure::Executor(_))), "{:?}", answers[0].1);
    assert_eq!(answers[1].0, answer(&prompt(30, 2), &sampling(), 20));
}

#[test]
fn losses_between_steps_end_no_request() {
    let mut frail = Frail::new(&[], 1);
    frail.lost_after = (1..20).collect();
    let mut engine = Engine::new(frail, 64);
    for ((tokens, _), seed) in run(&mut engine).iter().zip([1, 2]) {
        assert_eq!(*tokens, answer(&prompt(30, seed), &sampling(), 20));
    }
    assert!(engine.stats().replays > 4, "{:?}", engine.stats());
}

#[test]
fn a_session_that_ends_alone_disturbs_no_other() {
    let mut frail = Frail::new(&[], 0);
    frail.preempted_at = vec![2, 5, 6, 12];
    let mut engine = Engine::new(frail, 64);
    for ((tokens, ending), seed) in run(&mut engine).iter().zip([1, 2]) {
        assert_eq!(*tokens, answer(&prompt(30, seed), &sampling(), 20));
        assert!(matches!(ending, FinishReason::Length), "{ending:?}");
    }
    let stats = engine.stats();
    assert_eq!((stats.preemptions, stats.replays), (4, 0));
    assert!(engine.executor().inner.is_clean());
}

#[test]
fn a_session_that_takes_long_to_open_keeps_no_other_waiting() {
    let mut frail = Frail::new(&[], 0);
    frail.opened_after = 10;
    let mut engine = Engine::new(frail, 64);
    for ((tokens, _), seed) in run(&mut engine).iter().zip([1, 2]) {
        assert_eq!(*tokens, answer(&prompt(30, seed), &sampling(), 20));
    }
    // 20 of the first, of which 10 are over when the second one begins.
    let steps = engine.executor().steps;
    assert!((30..35).contains(&steps), "{steps}");
}

#[test]
fn requests_do_not_wait_for_ever() {
    let options = EngineOptions { rebuild_timeout: Duration::ZERO, ..EngineOptions::default() };
    let mut engine = Engine::with_options(Frail::new(&[2], usize::MAX), options);
    for (_, ending) in run(&mut engine) {
        assert!(matches!(ending, FinishReason::Failed(Failure::Executor(_))), "{ending:?}");
    }
    // A new request is rejected at once.
    let refused = engine.add(request(3));
    assert!(matches!(refused, Err(EngineError::Executor(error)) if error.is_lost()));
}
