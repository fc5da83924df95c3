//! The engine on its own thread, with a fake executor whose steps can be delayed.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use engine::{
    Engine, EngineError, EngineOptions, EventKind, EventSink, Failure, FinishReason, Finished, Request, RequestHandle,
    SamplingParams, Service, SubmitError,
};
use testing::fake_executor::{Fake, answer, prompt, safe};
use types::TokenId;

/// Far longer than a test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Forwards events, until a number of tokens has come.
struct Sink {
    events: Sender<EventKind>,
    tokens_left: usize,
}

impl EventSink for Sink {
    fn send(&mut self, event: EventKind) -> bool {
        if matches!(event, EventKind::Token(_)) {
            match self.tokens_left.checked_sub(1) {
                Some(left) => self.tokens_left = left,
                None => return false,
            }
        }
        self.events.send(event).is_ok()
    }
}

fn request(length: usize, seed: u32, tokens_max: usize) -> Request {
    Request { sampling: safe(SamplingParams::default()), ..Request::greedy(prompt(length, seed), tokens_max) }
}

fn submit(service: &Service, request: Request) -> Result<(RequestHandle, Receiver<EventKind>), SubmitError> {
    let (events, receiver) = channel();
    let handle = service.submit(request, Box::new(Sink { events, tokens_left: usize::MAX }))?;
    Ok((handle, receiver))
}

/// Tokens and the end of a request.
fn collect(events: &Receiver<EventKind>) -> (Vec<TokenId>, Finished) {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            EventKind::Token(sampled) => tokens.push(sampled.token),
            EventKind::Finished(finished) => return (tokens, finished),
            EventKind::Accepted | EventKind::Prefilled { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// A service whose steps each need a permit.
fn gated(pages: usize, options: EngineOptions) -> (Service, Sender<()>) {
    let (permits, gate) = channel();
    let mut fake = Fake::new(pages, 400);
    fake.gate = Some(gate);
    fake.sequences_max = 4;
    (Service::start(Engine::with_options(fake, options)).unwrap(), permits)
}

fn is_cancelled(finished: &Finished) -> bool {
    matches!(finished.reason, FinishReason::Cancelled)
}

#[test]
fn many_callers_get_their_own_answers() {
    let service = Service::start(Engine::new(Fake::new(32, 400), 48)).unwrap();
    let callers: Vec<_> = (0..12u32)
        .map(|seed| {
            let service = service.clone();
            std::thread::spawn(move || {
                let (length, tokens) = (1 + 17 * seed as usize % 100, 5 + seed as usize);
                let (_handle, events) = submit(&service, request(length, seed, tokens)).unwrap();
                assert!(matches!(events.recv_timeout(PATIENCE).unwrap(), EventKind::Accepted));
                let (found, finished) = collect(&events);
                assert_eq!(found, answer(&prompt(length, seed), &safe(SamplingParams::default()), tokens));
                assert!(matches!(finished.reason, FinishReason::Length));
            })
        })
        .collect();
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    assert_eq!(service.drain(PATIENCE), 0);
    let stats = service.stats();
    assert_eq!((stats.running, stats.waiting, stats.finished.length), (0, 0, 12));
    assert_eq!((stats.pages_free, service.capacity().pages_free), (32, 32));
    assert_eq!(stats.decoded_tokens, (5..17).sum::<u64>());
}

#[test]
fn dropping_a_handle_frees_its_pages_within_one_step() {
    let (service, permits) = gated(32, EngineOptions::default());
    let (handle, events) = submit(&service, request(60, 1, 300)).unwrap();
    permits.send(()).unwrap();
    while !matches!(events.recv_timeout(PATIENCE).unwrap(), EventKind::Token(_)) {}
    drop(handle);
    // One permit for the step that may have begun already; no other step runs without a permit.
    permits.send(()).unwrap();
    let (tokens, finished) = collect(&events);
    assert!(tokens.len() <= 1 && is_cancelled(&finished));
    assert_eq!(service.drain(PATIENCE), 0);
    assert_eq!((service.stats().running, service.stats().pages_free), (0, 32));
    assert_eq!(service.stats().finished.cancelled, 1);
}

#[test]
fn a_sink_without_a_receiver_cancels_its_request() {
    let service = Service::start(Engine::new(Fake::new(32, 400), 48)).unwrap();
    let (events, receiver) = channel();
    let handle = service.submit(request(20, 1, 300), Box::new(Sink { events, tokens_left: 3 })).unwrap();
    assert_eq!(service.drain(PATIENCE), 0);
    let tokens = receiver.iter().filter(|event| matches!(event, EventKind::Token(_))).count();
    assert_eq!((tokens, service.stats().finished.cancelled, service.stats().pages_free), (3, 1, 32));
    drop(handle);
}

#[test]
fn what_can_never_run_is_refused_at_once() {
    let (service, _permits) = gated(4, EngineOptions::default());
    let error = submit(&service, request(128, 1, 5)).unwrap_err();
    let SubmitError::Refused(EngineError::PromptTooLong { tokens: 128, max: 128 }) = error else { panic!("{error}") };
    assert_eq!(service.capacity().tokens_max(), 128);
}

#[test]
fn a_full_queue_is_reported_at_once() {
    let options = EngineOptions { waiting_max: 2, ..EngineOptions::default() };
    let (service, permits) = gated(32, options);
    // Four run, and two wait.
    let mut accepted = Vec::new();
    for seed in 0..6 {
        accepted.push(submit(&service, request(10, seed, 5)).unwrap());
    }
    let error = submit(&service, request(10, 9, 5)).unwrap_err();
    let SubmitError::Refused(EngineError::QueueFull { retry_after, .. }) = error else { panic!("{error}") };
    assert!(retry_after >= Duration::from_secs(1));
    drop(permits);
    for (_handle, events) in &accepted {
        assert_eq!(collect(events).0.len(), 5);
    }
    assert_eq!(service.drain(PATIENCE), 0);
}

#[test]
fn draining_lets_what_was_accepted_finish_and_accepts_nothing_more() {
    let (service, permits) = gated(32, EngineOptions::default());
    let (_handle, events) = submit(&service, request(30, 1, 20)).unwrap();
    let drained = {
        let service = service.clone();
        std::thread::spawn(move || service.drain(PATIENCE))
    };
    // Requests are accepted until the other thread has begun to drain.
    let mut late = Vec::new();
    let begun = Instant::now();
    let error = loop {
        assert!(begun.elapsed() < PATIENCE, "the service never begins to drain");
        match submit(&service, request(10, 2, 1)) {
            Ok(accepted) => late.push(accepted),
            Err(SubmitError::Refused(EngineError::QueueFull { .. })) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, SubmitError::Draining));
    drop(permits);
    assert_eq!(drained.join().unwrap(), 0);
    assert_eq!(collect(&events).0, answer(&prompt(30, 1), &safe(SamplingParams::default()), 20));
    assert!(late.iter().all(|(_, events)| collect(events).0.len() == 1));
}

#[test]
fn what_is_unfinished_at_the_deadline_is_counted_and_cancelled() {
    let (service, permits) = gated(32, EngineOptions::default());
    let both: Vec<_> = (0..2).map(|seed| submit(&service, request(30, seed, 300)).unwrap()).collect();
    permits.send(()).unwrap();
    assert_eq!(service.drain(Duration::ZERO), 2);
    permits.send(()).unwrap();
    for (_handle, events) in &both {
        assert!(is_cancelled(&collect(events).1));
    }
    assert_eq!(service.drain(PATIENCE), 0);
    assert_eq!(service.stats().pages_free, 32);
}

#[test]
fn an_error_of_the_executor_ends_all_requests_and_the_service_goes_on() {
    let (permits, gate) = channel();
    let mut fake = Fake::new(32, 400);
    fake.gate = Some(gate);
    let breaks = fake.breaks.clone();
    let service = Service::start(Engine::new(fake, 64)).unwrap();
    let both: Vec<_> = (0..2).map(|seed| submit(&service, request(30, seed, 50)).unwrap()).collect();
    permits.send(()).unwrap();
    for (_handle, events) in &both {
        assert!(matches!(events.recv_timeout(PATIENCE).unwrap(), EventKind::Accepted));
    }
    breaks.store(true, Ordering::Relaxed);
    drop(permits);
    for (_handle, events) in &both {
        let finished = collect(events).1;
        assert!(matches!(finished.reason, FinishReason::Failed(Failure::Executor(_))), "{finished:?}");
    }
    let (_handle, events) = submit(&service, request(30, 3, 10)).unwrap();
    assert_eq!(collect(&events).0, answer(&prompt(30, 3), &safe(SamplingParams::default()), 10));
    assert_eq!(service.drain(PATIENCE), 0);
    assert_eq!((service.stats().finished.failed, service.stats().pages_free), (2, 32));
}

#[test]
fn requests_outlive_the_handles_of_their_service() {
    let service = Service::start(Engine::new(Fake::new(32, 400), 64)).unwrap();
    let (_handle, events) = submit(&service, request(30, 3, 40)).unwrap();
    drop(service);
    assert_eq!(collect(&events).0.len(), 40);
    assert!(events.recv_timeout(PATIENCE).is_err(), "the thread ends, and its sinks with it");
}

#[test]
fn nothing_leaks_when_callers_come_and_go_as_they_like() {
    const CALLERS: u32 = 4;
    const REQUESTS: u32 = 60;
    let options = EngineOptions { chunk: 32, waiting_max: 8, draft_tokens_max: 2, ..EngineOptions::default() };
    let service = Service::start(Engine::with_options(Fake::new(12, 300), options)).unwrap();
    let caller = |caller: u32| {
        let service = service.clone();
        move || {
            for index in 0..REQUESTS {
                let seed = caller * REQUESTS + index;
                // Some wait for all tokens, some for a few, some for none; some drop the receiver.
                let (length, tokens) = (1 + seed as usize * 37 % 150, 1 + seed as usize * 11 % 50);
                let begun = Instant::now();
                let (handle, events) = loop {
                    assert!(begun.elapsed() < PATIENCE, "the queue stays full");
                    match submit(&service, request(length, seed % 7, tokens)) {
                        Ok(accepted) => break accepted,
                        Err(SubmitError::Refused(EngineError::QueueFull { .. })) => std::thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                };
                match seed % 4 {
                    0 => drop(events),
                    1 => drop(handle),
                    2 => drop(events.iter().take(seed as usize % 9).count()),
                    _ => {
                        let want = answer(&prompt(length, seed % 7), &safe(SamplingParams::default()), tokens);
                        assert_eq!(collect(&events).0, want);
                    }
                }
            }
        }
    };
    let callers: Vec<_> = (0..CALLERS).map(|index| std::thread::spawn(caller(index))).collect();
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    assert_eq!(service.drain(PATIENCE), 0);
    let stats = service.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_free), (0, 0, 12));
    assert_eq!(stats.finished.total(), u64::from(CALLERS * REQUESTS));
    assert_eq!(stats.finished.failed + stats.finished.context, 0, "{stats:?}");
}
