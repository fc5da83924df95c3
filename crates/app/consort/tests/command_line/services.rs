//! The unit and the container file of `docs/`: their command lines run, as far as that goes without a service manager. Where
//! `systemd-analyze` is installed, it checks the unit too.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use testing::bounded::{Log, ended, output};
use testing::needs;
use testing::serving::{kill, text};

fn document(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap()
}

fn path(name: &str) -> PathBuf {
    testing::repository("docs").join(name)
}

/// Runs the command until it is ready, and ends it as a service manager does.
fn runs(args: &[String], key: Option<&str>) {
    let args: Vec<_> = args.iter().map(String::as_str).chain(["--listen", "127.0.0.1:0", "--no-mdns"]).collect();
    let mut command = super::consort(&args);
    if let Some(key) = key {
        command.env("CONSORT_CLUSTER_KEY", key);
    }
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = Log::read(child.stderr.take().unwrap());
    log.line_with("ready to run layers");
    kill("TERM", child.id());
    assert_eq!(ended(&mut child).code(), Some(0), "{}", log.so_far());
}

#[test]
fn the_command_of_the_unit_runs() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("cluster.key");
    fs::write(&key, "a passphrase of the tests\n").unwrap();
    let unit = document("consort-join.service");
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/consort ")).unwrap();
    let place = folder.path().to_str().unwrap();
    let line = line.replace("${CREDENTIALS_DIRECTORY}", place).replace("${CACHE_DIRECTORY}", place);
    runs(&line.split(' ').map(str::to_owned).collect::<Vec<_>>(), None);
}

#[test]
fn the_command_of_the_container_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = document("Containerfile");
    let line = file.lines().find_map(|line| line.strip_prefix("CMD ")).unwrap();
    let mut args: Vec<String> = serde_json::from_str(line).unwrap();
    let store = args.iter_mut().find(|arg| *arg == "/store").unwrap();
    *store = folder.path().to_str().unwrap().to_owned();
    runs(&args, Some("a passphrase of the tests"));
}

#[test]
fn systemd_accepts_the_unit_where_it_is_installed() {
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no"]);
    // The program that the unit names is not installed here.
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("consort-join.service");
    let program = env!("CARGO_BIN_EXE_consort");
    fs::write(&unit, document("consort-join.service").replace("/usr/local/bin/consort", program)).unwrap();
    command.arg(&unit);
    if !needs::systemd() {
        return;
    }
    let checked = output(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert!(checked.status.success(), "{}{}", text(&checked.stdout), text(&checked.stderr));
}
