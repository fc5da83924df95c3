//! `Launcher`: starts rank processes from a thread that lives as long as the group. A rank asks the kernel to end it with its parent,
//! and for the kernel that is the thread which started it.

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
    /// `program` is this very binary: ranks have to agree with their supervisor in every bit.
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
