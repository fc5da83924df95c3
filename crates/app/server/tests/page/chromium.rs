//! A headless Chromium, driven with the DevTools protocol over a pipe. It needs no port, and the browser ends with this
//! process.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use testing::needs;

/// If the browser does not reply for this long, the test fails.
const HANG: Duration = Duration::from_secs(120);

type Reply = Result<Value, String>;

pub struct Chromium {
    child: Mutex<Child>,
    input: Mutex<ChildStdin>,
    seen: Arc<Seen>,
    next: AtomicU64,
    _profile: TempDir,
}

/// Replies and events of the browser.
#[derive(Default)]
struct Seen {
    waiting: Mutex<HashMap<u64, Sender<Reply>>>,
    /// Events of each session, in order.
    events: Mutex<HashMap<String, Vec<Value>>>,
}

impl Chromium {
    /// The browser that all tests share, if there is one. It ends when the last test drops it.
    pub fn shared() -> Option<Arc<Self>> {
        let program = needs::browser()?;
        static SHARED: Mutex<Weak<Chromium>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Some(shared.upgrade().unwrap_or_else(|| {
            let browser = Arc::new(Self::start(&program));
            *shared = Arc::downgrade(&browser);
            browser
        }))
    }

    fn start(program: &Path) -> Self {
        let profile = TempDir::new().unwrap();
        // The protocol uses descriptors 3 and 4; the shell connects the pipes to them.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"])
            .arg(program)
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args([
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-sandbox", // root, as in containers, cannot use the sandbox
                "--no-first-run",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-default-apps",
                "--disable-extensions",
                "--disable-sync",
                // Background pages must not be throttled, because tests run in parallel.
                "--disable-background-timer-throttling",
                "--disable-backgrounding-occluded-windows",
                "--disable-renderer-backgrounding",
                "--force-color-profile=srgb",
                "about:blank",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("start a shell");
        let input = child.stdin.take().unwrap();
        let output = child.stdout.take().unwrap();
        let seen = Arc::new(Seen::default());
        std::thread::spawn({
            let seen = Arc::clone(&seen);
            move || seen.listen(output)
        });
        Self { child: Mutex::new(child), input: Mutex::new(input), seen, next: AtomicU64::new(1), _profile: profile }
    }

    /// Sends one command and returns its result. `session` is the page, or `None` for the browser.
    pub fn call(&self, session: Option<&str>, method: &str, params: Value) -> Reply {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = mpsc::channel();
        self.seen.waiting.lock().unwrap().insert(id, sender);
        let mut message = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.input.lock().unwrap().write_all(&bytes).map_err(|error| format!("chromium is gone: {error}"))?;
        reply.recv_timeout(HANG).map_err(|_| format!("chromium gave no answer to {method}"))?
    }

    /// The events of a session so far with this `method`.
    pub fn events(&self, session: &str, method: &str) -> Vec<Value> {
        let events = self.seen.events.lock().unwrap();
        let of_session = events.get(session).into_iter().flatten();
        of_session.filter(|event| event["method"] == method).map(|event| event["params"].clone()).collect()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Seen {
    fn listen(&self, output: ChildStdout) {
        let mut output = BufReader::new(output);
        let mut frame = Vec::new();
        while output.read_until(0, &mut frame).is_ok_and(|read| read > 0) {
            let Ok(message) = serde_json::from_slice::<Value>(&frame[..frame.len() - 1]) else { break };
            frame.clear();
            if let Some(id) = message["id"].as_u64() {
                let reply = match message.get("error") {
                    Some(error) => Err(error.to_string()),
                    None => Ok(message["result"].clone()),
                };
                if let Some(waiting) = self.waiting.lock().unwrap().remove(&id) {
                    let _ = waiting.send(reply);
                }
            } else if let Some(session) = message["sessionId"].as_str() {
                self.events.lock().unwrap().entry(session.to_owned()).or_default().push(message.clone());
            }
        }
        self.waiting.lock().unwrap().clear();
    }
}
