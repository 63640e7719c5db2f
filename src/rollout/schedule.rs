//! Which tasks a policy version samples: every task once an epoch, each epoch in an order of its own.

use super::derive_seed;

/// The order of tasks over a whole run. Stateless: a resumed run asks for the same version and gets the
/// same tasks.
#[derive(Debug, Clone, Copy)]
pub struct TaskOrder {
    tasks: usize,
    seed: u64,
}

impl TaskOrder {
    /// Over `tasks` tasks; `None` if there are none.
    #[must_use]
    pub fn new(tasks: usize, seed: u64) -> Option<Self> {
        (tasks > 0).then_some(Self { tasks, seed })
    }

    /// Task indices of the groups `first..first + count`, counted from the start of the run.
    #[must_use]
    pub fn groups(&self, first: u64, count: usize) -> Vec<usize> {
        let tasks = self.tasks as u64;
        let mut epoch_order = None;
        (first..first + count as u64)
            .map(|group| {
                let epoch = group / tasks;
                if epoch_order.as_ref().is_none_or(|(known, _)| *known != epoch) {
                    epoch_order = Some((epoch, self.permutation(epoch)));
                }
                let (_, order) = epoch_order.as_ref().expect("set above");
                order[(group % tasks) as usize]
            })
            .collect()
    }

    /// Fisher-Yates with counter-based numbers.
    fn permutation(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.tasks).collect();
        for last in (1..self.tasks).rev() {
            let random = derive_seed(&[self.seed, epoch, last as u64]);
            order.swap(last, (random % (last as u64 + 1)) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_holds_every_task_once_in_another_order() {
        let order = TaskOrder::new(10, 7).expect("tasks");
        let first = order.groups(0, 10);
        let second = order.groups(10, 10);
        assert_ne!(first, second);
        for mut epoch in [first, second] {
            epoch.sort_unstable();
            assert_eq!(epoch, (0..10).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_resumed_run_gets_the_same_tasks() {
        let order = TaskOrder::new(7, 1).expect("tasks");
        let whole = order.groups(0, 20);
        assert_eq!(whole[12..], order.groups(12, 8));
    }
}
