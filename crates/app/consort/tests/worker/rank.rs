//! A rank process, and the leader's end of its pipes.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Far longer than any reply takes: a longer wait means a hang.
pub const WATCHDOG: Duration = Duration::from_secs(120);

pub struct Rank {
    pub child: Child,
    pub input: Option<ChildStdin>,
    pub replies: Receiver<String>,
}

impl Rank {
    pub fn start(rank: usize, world: usize) -> Self {
        Self::start_with(rank, world, &[])
    }

    pub fn start_with(rank: usize, world: usize, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(["--worker", "--rank", &rank.to_string(), "--tp-size", &world.to_string(), "--cuda-device", "3"]);
        command.envs(environment.iter().copied());
        Self::spawn(command)
    }

    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let (sender, replies) = channel();
        thread::spawn(move || {
            for line in output.split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
        Self { child, input, replies }
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub fn send(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next line as text; `None` at the end of the output.
    pub fn line(&self) -> Option<String> {
        match self.replies.recv_timeout(WATCHDOG) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no reply"),
        }
    }

    pub fn reply(&self) -> Value {
        serde_json::from_str(&self.line().expect("a rank that answers")).unwrap()
    }

    pub fn ask(&mut self, request: &Value) -> Value {
        self.send(&request.to_string());
        self.reply()
    }

    /// Sends a request and compares the whole reply with `expected`.
    pub fn check(&mut self, request: &Value, expected: &Value) {
        assert_eq!(self.ask(request), *expected, "{request}");
    }

    pub fn refused(&mut self, request: &Value, kind: &str) {
        check_error(&self.ask(request), kind);
    }

    /// Aborts an epoch that this rank waits in. The replies to the abort and to the interrupted op may come in either order.
    pub fn abort(&mut self, epoch: u32) {
        self.send(&json!({"op": "abort", "id": 7, "epoch": epoch}).to_string());
        let (answers, others): (Vec<_>, _) =
            [self.reply(), self.reply()].into_iter().partition(|reply| reply["id"] == 7);
        assert_eq!(answers, [json!({"op": "aborted", "id": 7, "epoch": epoch})]);
        others.iter().for_each(|reply: &Value| check_error(reply, "aborted"));
    }

    pub fn end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < WATCHDOG, "a rank that does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn shut_down(mut self) {
        self.check(&json!({"op": "shutdown"}), &json!({"op": "bye"}));
        assert_eq!(self.end().code(), Some(0));
        assert_eq!(self.line(), None, "nothing follows the last reply");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
pub fn check_error(reply: &Value, kind: &str) {
    assert_eq!(reply["op"], "error", "{reply}");
    assert_eq!(reply["kind"], kind, "{reply}");
    assert!(reply["message"].as_str().is_some_and(|message| !message.is_empty()), "{reply}");
}

/// Sends the same line to all ranks before it waits for any reply, as a leader does.
pub fn ask_all(ranks: &mut [Rank], request: &Value) -> Vec<Value> {
    ranks.iter_mut().for_each(|rank| rank.send(&request.to_string()));
    ranks.iter().map(Rank::reply).collect()
}

#[track_caller]
pub fn check_all(ranks: &mut [Rank], request: &Value, expected: &Value) {
    for reply in ask_all(ranks, request) {
        assert_eq!(reply, *expected, "{request}");
    }
}

pub fn model(architecture: &str) -> PathBuf {
    let folder = testing::oracle(architecture);
    folder.join("model-f32").canonicalize().unwrap()
}

pub fn load_dense(architecture: &str, model_id: &str) -> Value {
    let folder = model(architecture);
    json!({
        "op": "load_dense_shard",
        "model_id": model_id,
        "config_json": fs::read_to_string(folder.join("config.json")).unwrap(),
        "safetensors_paths": [folder.join("model.safetensors")],
    })
}

/// An id that no other test and no other run uses.
pub fn comm_id(test: u8) -> String {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    format!("{test:02x}{:08x}{now:032x}", std::process::id()).repeat(6)
}
