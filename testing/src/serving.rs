//! Runs the binary for tests: to its end, or as a server with rank processes that tests inspect and kill.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::{env, fs};

use serde_json::Value;

use crate::bounded::{self, Log, WAIT_MAX, ended, wait_until};
use crate::oracle;

/// The binary, of whose package's tests this is a part.
fn binary() -> OsString {
    env::var_os("CARGO_BIN_EXE_consort").expect("cargo names the binary to the tests of its package")
}

pub fn consort(args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    with_environment(command.args(args));
    command
}

fn with_environment(command: &mut Command) {
    command.env("CONSORT_THREADS", "1").env_remove("CONSORT_LOG").env_remove("RUST_LOG").stdin(Stdio::null());
    // What the person who runs the tests has is not for them.
    let state = Path::new(&binary()).ancestors().nth(2).expect("a folder of the target").join("tmp/state");
    command.env("CONSORT_CONFIG", "").env("XDG_STATE_HOME", state);
}

pub fn run(args: &[&str]) -> Output {
    bounded::output(&mut consort(args))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn ids(value: &Value) -> String {
    value.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

pub fn tokens(model: &Path, prompt: &str, max: usize, options: &[&str]) -> Vec<u32> {
    let max = max.to_string();
    let args = ["debug", "tokens", model.to_str().unwrap(), "--tokens", prompt, "--max-tokens", &max];
    let output = run(&[&args, options].concat());
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn logits(model: &Path, prompt: &str, options: &[&str]) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("logits");
    let args = [
        "debug",
        "logits",
        model.to_str().unwrap(),
        "--tokens",
        prompt,
        "--chunk",
        "7",
        "--out",
        file.to_str().unwrap(),
    ];
    let output = run(&[&args, options].concat());
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    fs::read(file).unwrap().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

pub fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// A server, perhaps with ranks. Dropping it ends the process.
pub struct Server {
    pub child: Child,
    pub address: String,
    /// The address of the admin port, if `--admin` is among the options.
    pub admin: Option<String>,
    pub log: Log,
}

impl Server {
    pub fn start(options: &[&str]) -> Self {
        Self::start_with(options, &[])
    }

    /// `environment`: variables for the server and its ranks.
    pub fn start_with(options: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::start_under("true", &oracle("qwen3/model-f32"), options, environment)
    }

    /// Starts a server that calls its model `m`, and waits until it is ready. `limits`: see [`Self::listen`].
    pub fn start_under(limits: &str, model: &Path, options: &[&str], environment: &[(&str, &str)]) -> Self {
        let options = [&["--served-model-name", "m"], options].concat();
        let server = Self::listen(limits, model.to_str().unwrap(), &options, environment);
        server.wait_until_ready();
        server
    }

    /// Starts a server and waits until it listens. `limits`: a shell command that sets limits of the server and its ranks.
    pub fn listen(limits: &str, model: &str, options: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new("sh");
        let run = format!("{limits} && exec \"$0\" \"$@\"");
        command.args(["-c", &run]).arg(binary()).args(["serve", model, "--port", "0"]).args(options);
        with_environment(&mut command);
        command.envs(environment.iter().copied());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let address = |words: &str| {
            let line = log.line_with(words);
            let address = line.split("http://").nth(1).unwrap();
            address.split([' ', '"']).next().unwrap().trim().to_owned()
        };
        let admin = options.contains(&"--admin").then(|| address("probes and metrics on http://"));
        let address = address("listening on http://");
        Self { child, address, admin, log }
    }

    pub fn open(&self, request: &str, body: &str) -> TcpStream {
        open(&self.address, request, "", body)
    }

    pub fn ask(&self, request: &str, body: &str) -> String {
        ask(&self.address, request, "", body)
    }

    pub fn wait_until_ready(&self) {
        wait_until("the server is ready", || self.ask("GET /ready", "").starts_with("HTTP/1.1 200"));
    }

    pub fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }

    pub fn signal(&self, name: &str) {
        kill(name, self.child.id());
    }

    /// Waits until the process has ended. Returns its exit status, and the rest of its log.
    pub fn end(mut self) -> (Option<i32>, String) {
        let rest = self.log.rest();
        (ended(&mut self.child).code(), rest)
    }
}

/// Sends a request, such as `GET /ready`. Each of the headers ends with a line break.
pub fn open(address: &str, request: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
    write!(stream, "{request} HTTP/1.1\r\n{head}{headers}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream
}

/// The response to a request.
pub fn ask(address: &str, request: &str, headers: &str, body: &str) -> String {
    let mut answer = String::new();
    open(address, request, headers, body).read_to_string(&mut answer).unwrap();
    answer
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn children(parent: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| parent_and_state(pid).is_some_and(|(of, state)| of == parent && state != "Z")).collect()
}

pub fn parent_and_state(pid: u32) -> Option<(u32, String)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.to_owned();
    Some((fields.next()?.parse().ok()?, state))
}

pub fn is_gone(pid: u32) -> bool {
    parent_and_state(pid).is_none_or(|(_, state)| state == "Z")
}

pub fn kill(signal: &str, pid: u32) {
    assert!(Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap().success());
}

/// The value of the first metric whose line begins like this.
pub fn metric(metrics: &str, beginning: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(beginning));
    line.unwrap_or_else(|| panic!("{beginning}: {metrics}")).rsplit(' ').next().unwrap().parse().unwrap()
}

/// The text of a completion, streamed or not.
pub fn completion(answer: &str) -> String {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let pieces = body.lines().filter_map(|line| line.strip_prefix("data: ").or(line.starts_with('{').then_some(line)));
    let values = pieces.filter_map(|piece| serde_json::from_str::<Value>(piece).ok());
    values.filter_map(|value| value["choices"][0]["text"].as_str().map(str::to_owned)).collect()
}
