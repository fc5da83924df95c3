//! An executor that loses its sessions at any of its calls, with up to four steps in flight: every answer is that of an
//! undisturbed run, and nothing leaks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{
    Capacity, Engine, EngineOptions, EventKind, Executor, ExecutorError, FinishReason, Finished, Health, OpenedSession,
    Prefix, Request, SamplingParams, StepOutput, StepPlan,
};
use testing::fake_executor::{Fake, POISON, answer, prompt};
use types::{SessionId, TokenId};

/// Far longer than a test takes.
const PATIENCE: Duration = Duration::from_secs(60);
const TOKENS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Open,
    Truncate,
    Submit,
    Collect,
    PollHealth,
}

const CALLS: [Call; 5] = [Call::Open, Call::Truncate, Call::Submit, Call::Collect, Call::PollHealth];

/// Loses all sessions and all steps in flight at the calls `lost_at` of one kind. It is ready again after `polls` polls of its
/// health.
struct Frail {
    inner: Fake,
    kind: Call,
    lost_at: Vec<usize>,
    calls: usize,
    losses: usize,
    polls: usize,
    polls_left: usize,
    /// The most steps that were in flight, and of these at a loss.
    in_flight: usize,
    in_flight_max: usize,
    in_flight_lost: usize,
}

impl Frail {
    fn new(depth: usize, kind: Call, lost_at: Vec<usize>, polls: usize) -> Self {
        Self {
            inner: Fake::new(64, 400).with_depth(depth),
            kind,
            lost_at,
            calls: 0,
            losses: 0,
            polls,
            polls_left: 0,
            in_flight: 0,
            in_flight_max: 0,
            in_flight_lost: 0,
        }
    }

    /// Counts a call; an error if sessions are lost at it, or are lost already.
    fn check(&mut self, kind: Call) -> Result<(), ExecutorError> {
        let is_lost = self.polls_left > 0;
        if kind == self.kind {
            self.calls += 1;
            if self.lost_at.contains(&self.calls) {
                self.lose();
                return Err(lost());
            }
        }
        if is_lost { Err(lost()) } else { Ok(()) }
    }

    fn lose(&mut self) {
        self.losses += 1;
        self.polls_left = self.polls;
        self.in_flight_lost = self.in_flight_lost.max(std::mem::take(&mut self.in_flight));
        self.inner = Fake::new(64, 400).with_depth(self.inner.depth);
        // The ids of the sessions that were lost do not come back, so that using one is an error.
        for _ in 0..1000 * self.losses {
            let opened: Vec<_> = (0..16).map(|_| self.inner.open(1, Prefix::NONE).unwrap().session).collect();
            opened.into_iter().for_each(|session| self.inner.close(session));
        }
    }
}

fn lost() -> ExecutorError {
    ExecutorError::Lost { why: why() }
}

fn why() -> Arc<str> {
    "the toy broke".into()
}

impl Executor for Frail {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn capacity(&self) -> Capacity {
        self.inner.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.check(Call::Open)?;
        self.inner.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.check(Call::Truncate)?;
        self.inner.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.inner.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.check(Call::Submit)?;
        self.inner.submit(plan)?;
        self.in_flight += 1;
        self.in_flight_max = self.in_flight_max.max(self.in_flight);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.check(Call::Collect)?;
        self.inner.collect(output)?;
        self.in_flight -= 1;
        Ok(())
    }

    fn poll_health(&mut self, _: Duration) -> Health {
        let is_lost_now = self.polls_left == 0 && self.check(Call::PollHealth).is_err();
        if is_lost_now {
            return Health::Rebuilding { why: why() };
        }
        if self.polls_left == 0 {
            return Health::Ready;
        }
        self.polls_left -= 1;
        Health::Rebuilding { why: why() }
    }
}

/// Few tokens are likely, so that answers repeat themselves: draft tokens are found, and some are rejected.
fn sampling() -> SamplingParams {
    let never = [(POISON, f32::NEG_INFINITY)];
    let bias = (1..=3).map(|token| (TokenId(token), 30.0)).chain(never).collect();
    SamplingParams { temperature: 0.8, seed: 7, logit_bias: Some(bias), ..SamplingParams::default() }
}

/// Short prompts and one of several chunks, two that share a prefix, and one that repeats itself.
fn prompts() -> Vec<Vec<TokenId>> {
    let shared = prompt(70, 1);
    let longer = [&shared[..], &prompt(9, 2)].concat();
    let repeated = prompt(3, 3).repeat(8);
    vec![prompt(5, 4), shared, longer, repeated, prompt(150, 5), prompt(30, 6)]
}

/// Adds half of the requests at once and the others while these run. Returns the answers, and how they ended.
fn run(engine: &mut Engine<Frail>, what: &str) -> Vec<(Vec<TokenId>, Option<FinishReason>)> {
    let mut waiting =
        prompts().into_iter().map(|prompt| Request { sampling: sampling(), ..Request::greedy(prompt, TOKENS) });
    let (mut ids, mut answers, mut events) = (Vec::new(), Vec::new(), Vec::new());
    let begun = Instant::now();
    loop {
        if let Some(request) = waiting.next() {
            ids.push(engine.add(request).unwrap());
            answers.push((Vec::new(), None));
            if ids.len() < prompts().len() / 2 {
                continue;
            }
        } else if engine.is_idle() {
            return answers;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}: the engine never becomes idle: {answers:?}");
        engine.step(&mut events).unwrap();
        for event in events.drain(..) {
            let (tokens, ending) = &mut answers[ids.iter().position(|&id| id == event.request).unwrap()];
            match event.kind {
                EventKind::Token(sampled) => tokens.push(sampled.token),
                EventKind::Finished(Finished { reason, .. }) => {
                    assert!(ending.is_none(), "{what}: it ends twice");
                    *ending = Some(reason);
                }
                _ => {}
            }
        }
    }
}

/// Runs all requests and compares the answers. Returns the executor.
fn check(depth: usize, draft_tokens_max: usize, executor: Frail) -> Frail {
    let what = format!("depth {depth}, lost at {:?} {:?}, {} polls", executor.kind, executor.lost_at, executor.polls);
    let options = EngineOptions { chunk: 48, draft_tokens_max, ..EngineOptions::default() };
    let mut engine = Engine::with_options(executor, options);
    let answers = run(&mut engine, &what);
    for ((tokens, ending), prompt) in answers.iter().zip(prompts()) {
        assert_eq!(*tokens, answer(&prompt, &sampling(), TOKENS), "{what}");
        assert!(matches!(ending, Some(FinishReason::Length)), "{what}: {ending:?}");
    }
    let executor = engine.into_executor();
    assert!(executor.inner.is_clean() && executor.in_flight == 0, "{what}: something is left");
    executor
}

#[test]
fn a_loss_at_any_call_with_any_number_of_steps_in_flight_changes_no_answer() {
    for depth in 1..=4 {
        for (kind, drafts) in CALLS.into_iter().flat_map(|kind| [0, 3].map(|drafts| (kind, drafts))) {
            let undisturbed = check(depth, drafts, Frail::new(depth, kind, vec![], 0));
            assert_eq!(undisturbed.in_flight_max, depth, "{kind:?}: so many steps are in flight");
            // Without draft tokens nothing is truncated.
            assert_eq!(undisturbed.calls > 0, kind != Call::Truncate || drafts > 0, "{kind:?}");
            let mut in_flight_lost = 0;
            for call in 1..=undisturbed.calls {
                let frail = check(depth, drafts, Frail::new(depth, kind, vec![call], call % 3));
                assert_eq!(frail.losses, 1, "depth {depth}, {kind:?} {call}");
                in_flight_lost = in_flight_lost.max(frail.in_flight_lost);
            }
            // Sessions are opened, and health is polled, when the oldest step was collected and none is submitted yet.
            let expected = match kind {
                Call::Collect => depth,
                _ => depth - 1,
            };
            assert!(undisturbed.calls == 0 || in_flight_lost == expected, "depth {depth}, {kind:?}: {in_flight_lost}");
        }
    }
}

/// The second loss comes while sequences are replayed, or soon after.
#[test]
fn losses_that_follow_each_other_change_no_answer() {
    for depth in 1..=4 {
        for kind in CALLS {
            let calls = check(depth, 3, Frail::new(depth, kind, vec![], 0)).calls;
            let mut twice = 0;
            for (first, gap) in (1..=calls).flat_map(|first| [1, 2, 5].map(|gap| (first, gap))) {
                let frail = check(depth, 3, Frail::new(depth, kind, vec![first, first + gap], gap % 2));
                assert!((1..=2).contains(&frail.losses), "depth {depth}, {kind:?} {first} {gap}");
                twice += usize::from(frail.losses == 2);
            }
            assert!(twice >= calls, "depth {depth}, {kind:?}: {twice} of {calls} runs with two losses");
        }
    }
}
