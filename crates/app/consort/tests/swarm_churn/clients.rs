//! The clients: each streams one completion after the other, and compares it with that of an undisturbed run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::REPLAY;
use crate::coverage::Coverage;
use testing::network::Network;
use testing::oracle;
use testing::serving::{Server, completion, open};

/// Clients at once.
pub const CLIENTS: usize = 8;
/// Different requests.
const REQUESTS: usize = 12;
/// The maximum time of a request before it counts as hung. While there is no chain, a request waits for one.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(300);
/// What a request may end with when there was no chain.
const NO_CHAIN: &str = "rank_lost";

/// What the requests came to.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: usize,
    pub completed: usize,
    pub tokens: usize,
    pub errors: BTreeMap<String, usize>,
    pub longest: Duration,
    pub problems: Vec<String>,
}

enum Outcome {
    Completed,
    /// An error with this code.
    Failed {
        code: String,
        message: String,
    },
    Problem(String),
}

/// The texts of the requests when one process runs the model alone.
pub fn undisturbed(model: &str) -> Vec<String> {
    let server = Server::start_under("true", &oracle(model), &[], &[]);
    (0..REQUESTS).map(|index| completion(&server.ask("POST /v1/completions", &request(index, false)))).collect()
}

/// Runs all clients until `is_over`, and each to the end of its last request.
pub fn run(network: &Network, address: &str, expected: &[String], coverage: &Coverage, is_over: &AtomicBool) -> Tally {
    let tally = Mutex::<Tally>::default();
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let tally = &tally;
            let run = move || {
                let mut index = client;
                while !is_over.load(Ordering::Acquire) {
                    let (begun, number) = (Instant::now(), index % REQUESTS);
                    let outcome = stream(address, number, &expected[number]);
                    tally.lock().unwrap().add(number, begun, outcome, coverage);
                    index += 5;
                }
            };
            scope.spawn(move || network.within(0, run));
        }
    });
    tally.into_inner().unwrap()
}

impl Tally {
    fn add(&mut self, number: usize, begun: Instant, outcome: Outcome, coverage: &Coverage) {
        self.requests += 1;
        self.longest = self.longest.max(begun.elapsed());
        match outcome {
            Outcome::Completed => {
                self.completed += 1;
                self.tokens += answer_tokens(number);
            }
            Outcome::Failed { code, message } => {
                // The time that requests wait counts from the loss, also for those that come later.
                let had_chain = coverage.was_complete_since(begun.checked_sub(REPLAY).unwrap_or(begun));
                eprintln!("request {number} failed after {:?}: {code}: {message}", begun.elapsed());
                if had_chain || code != NO_CHAIN {
                    self.problems.push(format!("there was a chain, but request {number} failed: {code}: {message}"));
                }
                *self.errors.entry(code).or_default() += 1;
            }
            Outcome::Problem(problem) => {
                eprintln!("request {number}: {problem}");
                self.problems.push(format!("request {number}: {problem}"));
            }
        }
    }
}

fn answer_tokens(index: usize) -> usize {
    24 + 8 * (index % 8)
}

fn request(index: usize, is_stream: bool) -> String {
    let prompt_tokens = 10 + 23 * (index % 6);
    let prompt: Vec<_> = (0..prompt_tokens).map(|place| (place * 7 + index * 31) % 200 + 1).collect();
    format!(
        r#"{{"model": "m", "prompt": {prompt:?}, "max_tokens": {}, "temperature": 0, "ignore_eos": true,
            "stream": {is_stream}}}"#,
        answer_tokens(index)
    )
}

fn stream(address: &str, index: usize, expected: &str) -> Outcome {
    let begun = Instant::now();
    let lines = BufReader::new(open(address, "POST /v1/completions", "", &request(index, true))).lines();
    let (mut text, mut is_done, mut head) = (String::new(), false, String::new());
    for line in lines {
        let line = match line {
            Ok(line) => line,
            Err(error) => return Outcome::Problem(format!("after {:?} and {text:?}: {error}", begun.elapsed())),
        };
        if begun.elapsed() > REQUEST_TIME_MAX {
            return Outcome::Problem(format!("not done after {:?} and {text:?}", begun.elapsed()));
        }
        if head.is_empty() {
            head.clone_from(&line);
        }
        is_done |= line == "data: [DONE]";
        // Without a stream, the body is the error.
        let event = line.strip_prefix("data: ").unwrap_or(&line);
        let Ok(event) = serde_json::from_str::<Value>(event) else { continue };
        if let Some(error) = event.get("error") {
            let field = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
            if !expected.starts_with(&text) {
                return Outcome::Problem(format!("{text:?} before an error instead of {expected:?}"));
            }
            return Outcome::Failed { code: field("code"), message: field("message") };
        }
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
    }
    match is_done {
        true if text == expected => Outcome::Completed,
        true => Outcome::Problem(format!("{text:?} instead of {expected:?}")),
        false => Outcome::Problem(format!("{head}: the stream ended after {text:?}")),
    }
}
