//! The streams that run while a fault happens.

use std::io::{BufRead, BufReader};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use testing::network::Network;
use testing::oracle;
use testing::serving::{Server, completion, open};

/// Streams at once.
const STREAMS: usize = 3;
/// Long enough for several prefill steps.
const PROMPT_TOKENS: usize = 200;
const ANSWER_TOKENS: usize = 48;

/// The texts of the streams when one process runs the model alone.
pub fn texts_without_faults() -> Vec<String> {
    let server = Server::start_under("true", &oracle("qwen3/model-f32"), &[], &[]);
    (0..STREAMS).map(|index| completion(&server.ask("POST /v1/completions", &request(index, false)))).collect()
}

/// Runs all streams at once, and compares their texts. Returns the longest time between two events of a stream.
pub fn run(network: &Network, address: &str, expected: &[String]) -> Result<Duration, String> {
    thread::scope(|scope| {
        let streams: Vec<_> =
            (0..STREAMS).map(|index| scope.spawn(move || network.within(0, || stream(address, index)))).collect();
        let mut longest = Duration::ZERO;
        for (stream, expected) in streams.into_iter().zip(expected) {
            let (text, pause) = stream.join().map_err(|_| "a stream panicked".to_owned())??;
            if text != *expected {
                return Err(format!("{text:?} instead of {expected:?}"));
            }
            longest = longest.max(pause);
        }
        Ok(longest)
    })
}

fn request(index: usize, is_stream: bool) -> String {
    let prompt: Vec<_> = (0..PROMPT_TOKENS).map(|place| (place * 7 + index * 31) % 200 + 1).collect();
    format!(
        r#"{{"model": "m", "prompt": {prompt:?}, "max_tokens": {ANSWER_TOKENS}, "temperature": 0, "ignore_eos": true,
            "stream": {is_stream}}}"#
    )
}

fn stream(address: &str, index: usize) -> Result<(String, Duration), String> {
    let lines = BufReader::new(open(address, "POST /v1/completions", "", &request(index, true))).lines();
    let (mut text, mut longest, mut last) = (String::new(), Duration::ZERO, Instant::now());
    let (mut is_first, mut is_done) = (true, false);
    for line in lines {
        let line = line.map_err(|error| format!("after {text:?}: {error}"))?;
        let Some(event) = line.strip_prefix("data: ") else { continue };
        is_done |= event == "[DONE]";
        let Ok(event) = serde_json::from_str::<Value>(event) else { continue };
        if let Some(error) = event.get("error") {
            return Err(format!("after {text:?}: {error}"));
        }
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        // The time until the first event has the prompt in it.
        if !std::mem::take(&mut is_first) {
            longest = longest.max(last.elapsed());
        }
        last = Instant::now();
    }
    if is_done { Ok((text, longest)) } else { Err(format!("the stream ended after {text:?}")) }
}
