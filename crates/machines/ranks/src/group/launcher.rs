//! `Launcher`: starts rank processes from a thread that lives as long as the group. A rank asks the kernel to kill it
//! when its parent dies (PDEATHSIG), and for the kernel the parent is the thread that spawned it.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use types::Rank;

use crate::worker::command;

#[derive(Debug)]
pub(super) struct Launcher {
    orders: Sender<Rank>,
    children: Receiver<io::Result<Child>>,
}

impl Launcher {
    /// `program` is the supervisor's own binary: all processes of a group must be the same build.
    pub fn start(program: PathBuf, environment: Vec<(String, String)>) -> io::Result<Self> {
        let (orders, received) = channel();
        let (started, children) = channel();
        thread::Builder::new().name("launcher".into()).spawn(move || {
            for rank in received {
                let mut command = command(&program, rank, rank.index());
                command.envs(environment.iter().cloned()).stdin(Stdio::piped()).stdout(Stdio::piped());
                if started.send(command.spawn()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { orders, children })
    }

    pub fn launch(&self, rank: Rank) -> io::Result<Child> {
        let gone = || io::Error::other("the thread that starts ranks has ended");
        self.orders.send(rank).map_err(|_| gone())?;
        self.children.recv().map_err(|_| gone())?
    }
}
