//! An executor that looks for a part of its model: requests wait, it is told what they wait for, and they end in time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use engine::{
    Capacity, Engine, EngineOptions, EventKind, Executor, ExecutorError, Failure, FinishReason, Finished,
    MissingLayers, OpenedSession, Prefix, Request, StepOutput, StepPlan, WaitingForModel,
};
use testing::fake_executor::{Fake, answer, prompt, safe};
use types::{LayerRange, SessionId, TokenId};

const WHY: &str = "no peer serves them";
/// How long requests wait.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What keeps the executor from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// Opening a session takes so many calls.
    Opening(usize),
    /// The first step takes so many calls until it is collected.
    Collecting(usize),
    /// No session can be opened, although the executor believes that it is ready.
    Flapping,
}

struct Searching {
    inner: Fake,
    trouble: Trouble,
    /// Since when the layers are looked for, as the executor knows.
    since: Option<Instant>,
}

impl Searching {
    fn new(trouble: Trouble, since: Option<Instant>) -> Self {
        Self { inner: Fake::new(64, 400), trouble, since }
    }
}

fn layers() -> LayerRange {
    LayerRange::new(4, 15).unwrap()
}

impl Executor for Searching {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.inner.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        match &mut self.trouble {
            Trouble::Opening(calls @ 1..) => {
                *calls -= 1;
                Err(ExecutorError::Opening)
            }
            Trouble::Flapping => Err(ExecutorError::Lost { why: WHY.into() }),
            _ => self.inner.open(tokens_max, prefix),
        }
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.inner.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.inner.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.inner.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.inner.collect(output)
    }

    fn poll_collect(&mut self, output: &mut StepOutput, _: Duration) -> Result<bool, ExecutorError> {
        if let Trouble::Collecting(calls @ 1..) = &mut self.trouble {
            *calls -= 1;
            return Ok(false);
        }
        self.collect(output).map(|()| true)
    }

    fn missing(&self) -> Option<MissingLayers> {
        let is_away = !matches!(self.trouble, Trouble::Opening(0) | Trouble::Collecting(0));
        self.since.filter(|_| is_away).map(|since| MissingLayers { layers: layers(), since, why: WHY.into() })
    }
}

/// An engine whose clock a test sets.
struct Scene {
    engine: Engine<Searching>,
    now: Arc<Mutex<Instant>>,
    begun: Instant,
}

impl Scene {
    /// `known`: for how long the executor has looked for the layers at the beginning; `None` if it does not know.
    fn new(trouble: Trouble, known: Option<Duration>) -> Self {
        let begun = Instant::now() + Duration::from_secs(3600);
        let now = Arc::new(Mutex::new(begun));
        let clock = Arc::clone(&now);
        let options = EngineOptions { rebuild_timeout: TIMEOUT, ..EngineOptions::default() };
        let executor = Searching::new(trouble, known.map(|known| begun - known));
        Self { engine: Engine::with_clock(executor, options, move || *clock.lock().unwrap()), now, begun }
    }

    fn waited(&self) -> Duration {
        *self.now.lock().unwrap() - self.begun
    }

    /// Runs a request, one second for each step. Returns its tokens, how it ended and what it waited for first.
    fn run(&mut self) -> (Vec<TokenId>, FinishReason, Option<WaitingForModel>) {
        self.engine.add(request()).unwrap();
        let (mut tokens, mut events, mut first) = (Vec::new(), Vec::new(), None);
        loop {
            // An error has ended the request, with an event.
            let ran = self.engine.step(&mut events);
            assert!(!matches!(ran, Ok(false)), "there is a request");
            first = first.or(self.engine.waiting_for());
            for event in events.drain(..) {
                match event.kind {
                    EventKind::Token(sampled) => tokens.push(sampled.token),
                    EventKind::Finished(Finished { reason, .. }) => return (tokens, reason, first),
                    _ => {}
                }
            }
            *self.now.lock().unwrap() += Duration::from_secs(1);
            assert!(self.waited() < 4 * TIMEOUT, "the request never ends");
        }
    }

    /// Runs a request that has to fail. Returns the error and how long it took.
    fn fail(&mut self) -> (String, Duration) {
        let begun = self.waited();
        let (tokens, ending, _) = self.run();
        let FinishReason::Failed(Failure::Executor(error)) = ending else { panic!("{ending:?}") };
        assert!(error.is_lost() && tokens.is_empty(), "{error}");
        (error.to_string(), self.waited() - begun)
    }
}

fn request() -> Request {
    Request { sampling: safe(Default::default()), ..Request::greedy(prompt(30, 1), 5) }
}

#[test]
fn requests_wait_for_a_session_and_for_a_step_and_it_is_told_for_what() {
    let expected = answer(&prompt(30, 1), &safe(Default::default()), 5);
    for trouble in [Trouble::Opening(9), Trouble::Collecting(9)] {
        for known in [None, Some(Duration::from_secs(3))] {
            let mut scene = Scene::new(trouble, known);
            let (tokens, ending, waiting) = scene.run();
            assert_eq!(tokens, expected, "{trouble:?}");
            assert!(matches!(ending, FinishReason::Length), "{ending:?}");
            let WaitingForModel { layers: found, since, why } = waiting.expect("it waits");
            assert_eq!(found, known.map(|_| layers()));
            assert_eq!(since, scene.begun - known.unwrap_or_default());
            assert_eq!(&*why, if known.is_some() { WHY } else { "it is not ready" });
            assert_eq!(scene.engine.waiting_for(), None, "no more");
            assert!(scene.engine.executor().inner.is_clean());
        }
    }
}

#[test]
fn requests_end_when_the_time_since_the_loss_is_over() {
    for trouble in [Trouble::Opening(usize::MAX), Trouble::Collecting(usize::MAX), Trouble::Flapping] {
        let (error, waited) = Scene::new(trouble, None).fail();
        assert!((TIMEOUT..TIMEOUT + Duration::from_secs(3)).contains(&waited), "{trouble:?}: {waited:?}");
        assert!(error.contains("within 30 s"), "{error}");
        // What the executor has waited for before counts too.
        let known = Duration::from_secs(20);
        let (error, waited) = Scene::new(trouble, Some(known)).fail();
        let left = TIMEOUT - known;
        assert!((left..left + Duration::from_secs(3)).contains(&waited), "{trouble:?}: {waited:?}");
        assert!(error.contains("layers 4..15 for 30 s") && error.contains(WHY), "{error}");
    }
}

#[test]
fn a_later_request_waits_as_long_again_if_the_executor_believes_that_it_is_ready() {
    let mut scene = Scene::new(Trouble::Flapping, None);
    for _ in 0..2 {
        let (_, waited) = scene.fail();
        assert!(waited >= TIMEOUT, "{waited:?}");
    }
}
